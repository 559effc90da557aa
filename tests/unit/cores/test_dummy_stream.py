"""The dummy core's streams: which rows each step has, and when the next is due."""

from __future__ import annotations

import math

import numpy as np

from mpillm.comms.messages import Batch, ResponseFlag
from mpillm.cores.dummy_stream import Streams

_FIRST, _FINAL, _PARTIAL = map(int, (ResponseFlag.FIRST, ResponseFlag.FINAL, ResponseFlag.PARTIAL))


def _rows(batch: Batch) -> list[tuple[int, int, list[int]]]:
    """Return id, flags and tokens of each row."""
    return [
        (int(part.rows["id"][0]), int(part.rows["flags"][0]), part.tokens.tolist()) for part in batch.split()
    ]


def test_rows_of_each_step() -> None:
    """A first token, later ones, and the whole answer at the end; a token of an answer of one is both."""
    streams = Streams(100, 1.0)
    streams.add(np.array([7, 8, 9], np.uint32), np.array([10, 98, 30], np.int32), np.array([1, 2, 3]), 0, 5.0)
    assert [streams.is_due(now) for now in (4.9, 5.0)] == [False, True]
    assert _rows(streams.step(5.0)) == [(7, _FIRST | _FINAL, [10]), (8, _FIRST, [98]), (9, _FIRST, [30])]
    assert streams.next_due() == 6.0
    assert _rows(streams.step(6.0)) == [(8, _FINAL, [98, 99]), (9, _PARTIAL, [31])]
    assert _rows(streams.step(7.5)) == [(9, _FINAL, [30, 31, 32])]
    assert (len(streams), streams.next_due()) == (0, math.inf)


def test_a_known_first_token_is_not_sent_again() -> None:
    """The tokens of an answer stay below the size of the vocabulary."""
    streams = Streams(100, 1.0)
    streams.add(np.array([1], np.uint32), np.array([99], np.int32), np.array([3]), 1, 0.0)
    assert _rows(streams.step(0.0)) == [(1, _PARTIAL, [0])]
    assert _rows(streams.step(1.0)) == [(1, _FINAL, [99, 0, 1])]


def test_the_next_is_due_as_streams_come_and_go() -> None:
    streams = Streams(100, 1.0)
    for id_, first_at in ((1, 3.0), (2, 2.0)):
        streams.add(np.array([id_], np.uint32), np.zeros(1, np.int32), np.array([5]), 0, first_at)
    assert streams.next_due() == 2.0
    assert streams.remove([2, 4]) == [2]
    assert streams.next_due() == 3.0
    assert streams.remove([1]) == [1]
    assert streams.next_due() == math.inf
