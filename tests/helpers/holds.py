"""How tests ask `held_cores` to hold a rank. Apart from it, since it imports MPI: a test that did would be a
world of one rank, which leaves 16 MiB in /dev/shm.
"""

from __future__ import annotations

from pathlib import Path

HELD = "tests.helpers.held_cores:Held"
HOLD, VICTIM = "MPILLM_TEST_HOLD", "MPILLM_TEST_VICTIM"
"""PHASE:RANK that waits in its phase until GO is there; PHASE:RANK that kills itself in its phase.

The phases are load, warmup, drain and stop; and, once all ranks are released from the last one, free
(communicators) and finalize.
"""
GO = Path("go")  # in the run's working directory
