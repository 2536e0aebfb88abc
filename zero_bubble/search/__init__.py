"""Schedules found: from times and memory limits to the order of passes."""
