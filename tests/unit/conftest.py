"""Property tests of this folder: no time limit for an example, machines are shared."""

from hypothesis import settings

settings.register_profile("unit", deadline=None, max_examples=50)
settings.load_profile("unit")
