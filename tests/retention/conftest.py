"""Property tests of this folder: no time limit for an example, machines are shared."""

from hypothesis import settings

settings.register_profile("retention", deadline=None, max_examples=100)
settings.load_profile("retention")
