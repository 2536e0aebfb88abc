"""The scheduler: orders of F, B and W passes for pipelines without bubbles.

Pure Python and numpy; imports neither torch nor Megatron.
"""

__version__ = "0.1.0"
