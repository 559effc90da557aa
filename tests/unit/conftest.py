"""For the unit tests: Hypothesis without a clock."""

from hypothesis import settings

# How long an example takes says nothing on a machine that does other work, too.
settings.register_profile("no clock", deadline=None)
settings.load_profile("no clock")
