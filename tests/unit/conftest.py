"""For the unit tests: Hypothesis without a clock, and a machine without GPUs."""

import pytest
from hypothesis import settings

from mpillm import devices

# How long an example takes says nothing on a machine that does other work, too.
settings.register_profile("no clock", deadline=None)
settings.load_profile("no clock")


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without NVIDIA's driver: what tests expect does not depend on the machine's GPUs."""
    monkeypatch.setattr(devices, "open_nvml", lambda: None)
