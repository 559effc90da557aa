"""Copies between a GPU and host memory: when they begin, and when they are done. Streams stand still here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mpillm.engine.handoff.host_mover import CopyStream, HostMover
from mpillm.engine.handoff.pinned import PinnedMemory
from mpillm.engine.tensors.staging import StreamEvent
from tests.helpers.loopback import Mark, Wire

TAG = 7


class Stream(CopyStream):
    """Copies at once, but says so only when asked to."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def mark(self) -> Mark:
        return Mark()

    @torch.inference_mode()
    def copy(self, into: torch.Tensor, source: torch.Tensor, ready: StreamEvent) -> Mark:
        into.copy_(source)
        self.marks.append(Mark(False))
        return self.marks[-1]

    def is_over(self) -> None:
        for mark in self.marks:
            mark.over = True


@pytest.fixture
def stream() -> Stream:
    return Stream()


def mover(wire: Wire, rank: int, stream: Stream) -> HostMover:
    return HostMover(wire.mover(rank), rank, PinnedMemory(0, pin=False), stream)


def piece(value: int) -> Any:
    return torch.full((5,), value, dtype=torch.uint8)


@pytest.mark.parametrize("host_first", [True, False])
@pytest.mark.parametrize("to_host", [True, False])
def test_a_piece_inside_a_rank_is_copied_when_both_ends_have_come(
    stream: Stream, to_host: bool, host_first: bool
) -> None:
    """Pieces with one tag meet in order; nothing goes over MPI."""
    wire = Wire()
    gpus = mover(wire, 0, stream)
    here, there = [np.full(5, i, np.uint8) for i in (1, 2)], [piece(i) for i in (3, 4)]

    def at_host() -> list[Any]:
        act = gpus.host_end.receive if to_host else gpus.host_end.send
        return [act(0, TAG, one) for one in here]

    def at_gpu() -> list[Any]:
        act = gpus.send if to_host else gpus.receive
        return [act(0, TAG, one) for one in there]

    moving = at_host() + at_gpu() if host_first else at_gpu() + at_host()
    gpus.poll()
    assert not any(one.done() for one in moving) and not wire.sent
    stream.is_over()
    assert all(one.done() for one in moving)
    expected = [3, 4] if to_host else [1, 2]
    assert [int(one[0]) for one in here] == [int(one[0]) for one in there] == expected


def test_another_rank_sends_when_its_gpu_has_copied_and_copies_when_it_has_received(stream: Stream) -> None:
    wire = Wire()
    gpus, memory = mover(wire, 1, stream), wire.mover(0)
    moving = gpus.send(0, TAG, piece(9))
    gpus.poll()
    assert not moving.done() and not wire.sent
    stream.is_over()
    gpus.poll()
    assert moving.done() and wire.sent == [(1, 0, TAG, 5)]
    got = np.zeros(5, np.uint8)
    assert memory.receive(1, TAG, got).done() and got[0] == 9

    into = piece(0)
    moving = gpus.receive(0, TAG, into)
    gpus.poll()
    assert not moving.done()
    memory.send(1, TAG, got)
    gpus.poll()
    assert not moving.done()
    stream.is_over()
    assert moving.done() and int(into[0]) == 9
