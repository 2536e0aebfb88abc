"""What a user can do wrong, and what can go wrong between stages."""

__all__ = ["ConfigurationError", "PipelineError"]


class ConfigurationError(ValueError):
    """A flag, file or version that cannot work; says which, its value, and what would work."""


class PipelineError(RuntimeError):
    """A stage could not go on; says stage, pass and channel."""
