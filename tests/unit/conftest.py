"""How hypothesis runs here: no time limit for a case, and the same cases on every machine."""

from hypothesis import settings

settings.register_profile("unit", deadline=None, derandomize=True)
settings.load_profile("unit")
