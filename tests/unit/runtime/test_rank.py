"""What a rank's watch sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpillm.comms.messages import Beat
from mpillm.comms.stopped_ranks import StoppedRanks
from mpillm.comms.tags import Tag
from mpillm.runtime.rank import Rank


@pytest.mark.parametrize("has_ended", [False, True])
def test_no_heartbeat_goes_to_a_rank_0_that_has_ended(has_ended: bool) -> None:
    """MPICH's UCX ends who sends to it, by a segmentation fault; under srun that one tells of the loss."""
    sent: list[tuple[int, Tag]] = []
    rank: Any = Rank.__new__(Rank)
    rank._rank0, rank._roles = None, []
    rank._stopped_ranks = StoppedRanks(1, {})
    rank._sampler = SimpleNamespace(sample=lambda: None)
    rank._control = SimpleNamespace(rank0_has_exited=lambda: has_ended)
    rank._beats = SimpleNamespace(send=lambda dest, tag, _: sent.append((dest, tag)), reap=lambda: None)
    rank._wakeup = SimpleNamespace(wake_own=lambda beat: None)
    rank._beat(Beat("test", 0.0, ""))
    assert sent == ([] if has_ended else [(0, Tag.BEAT)])
