"""A prefix cache that is emptied: later sequences find nothing, running ones keep their blocks."""

from __future__ import annotations

import pytest

from tests.helpers.hashing_engine import answer, check_blocks, check_empty, make_engine, run, sequence

PROMPT = list(range(20))


@pytest.mark.parametrize("partial_window", [0, 6], ids=["", "window blocks"])
def test_later_sequences_find_nothing(partial_window: int) -> None:
    engine = make_engine(reuse=True, partial_window=partial_window)
    n_reused = []
    for i in range(4):
        if i == 2:
            engine.reset_prefix_cache()
            check_empty(engine)
        engine.add(one := sequence(i, PROMPT, 4))
        run(engine)
        assert one.output == answer(PROMPT, 4, partial_window=partial_window)
        n_reused.append(one.n_reused)
    assert n_reused == [0, 16, 0, 16], "all but the last block, which the last token needs"


def test_running_sequences_go_on() -> None:
    """Blocks that they fill later are found, and all blocks come back."""
    engine = make_engine(reuse=True)
    first, second = sequence(0, PROMPT, 12), sequence(1, PROMPT, 12)
    engine.add(first)
    while len(first.output) < 4:
        engine.step()
    engine.reset_prefix_cache()
    check_blocks(engine)
    engine.add(second)
    run(engine)
    assert first.output == second.output == answer(PROMPT, 12)
    assert second.n_reused == 0
    check_empty(engine)


def test_an_engine_without_a_prefix_cache() -> None:
    engine = make_engine()
    engine.add(one := sequence(0, PROMPT, 4))
    run(engine)
    engine.reset_prefix_cache()
    assert one.output == answer(PROMPT, 4)
    check_empty(engine)
