"""Schedules for people and programs to read: terminal, SVG, JSON, PyTorch's CSV, Chrome traces."""
