"""Parts of one piece of memory: given out once, and again when nothing refers to them."""

from __future__ import annotations

import random

import numpy as np

from mpillm.engine.handoff.pinned import PinnedMemory

PAGE = 4096


def test_a_part_is_free_again_when_its_last_view_is_gone() -> None:
    pinned = PinnedMemory(4 * PAGE, pin=False)
    one = pinned.new(2 * PAGE)
    view = one[10:].view(np.uint8).reshape(2, -1)[1]
    del one
    assert pinned.n_free() == 2 * PAGE
    del view
    assert pinned.n_free() == 4 * PAGE


def test_parts_do_not_overlap_and_the_rest_is_other_memory() -> None:
    draw, pinned, held = random.Random(1), PinnedMemory(64 * PAGE, pin=False), list[tuple[int, np.ndarray]]()
    most = 0
    for step in range(2000):
        if held and draw.random() < 0.5:
            value, part = held.pop(draw.randrange(len(held)))
            assert (part == value).all()
            del part
        else:
            part = pinned.new(draw.choice([0, 1, PAGE, 3 * PAGE + 7, 20 * PAGE]))
            part[:] = step % 251
            held.append((step % 251, part))
            del part
        most = max(most, 64 * PAGE - pinned.n_free())
    assert most > 48 * PAGE
    held.clear()
    assert pinned.n_free() == 64 * PAGE and pinned.new(64 * PAGE).nbytes == 64 * PAGE
