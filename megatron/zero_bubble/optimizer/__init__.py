"""The optimizer step that goes ahead of its validation, and the ways to undo it."""
