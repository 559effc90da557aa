"""Hypothesis without a clock: how long an example takes says nothing on a machine that does other work, too."""

from hypothesis import settings

settings.register_profile("no clock", deadline=None)
settings.load_profile("no clock")
