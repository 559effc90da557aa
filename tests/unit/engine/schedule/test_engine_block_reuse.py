"""Sequences that begin alike share the blocks of their beginning, and no others."""

from __future__ import annotations

import pytest

from mpillm.engine.schedule.prefix_cache import PrefixCache
from mpillm.engine.schedule.sequence import Sequence
from tests.helpers.hashing_engine import SIZE, answer, check_blocks, check_empty, make_engine, run, sequence


def test_what_is_reused() -> None:
    engine = make_engine(reuse=True)
    blocks = engine.blocks
    assert isinstance(blocks, PrefixCache)

    def reused(i: int, prompt: list[int], n: int = 1) -> int:
        before, s = blocks.reused_blocks, sequence(i, prompt, n)
        engine.add(s)
        run(engine)
        assert s.output == answer(prompt, n)
        return blocks.reused_blocks - before

    prompt = list(range(16))
    assert reused(0, prompt) == 0
    assert reused(1, prompt) == 3, "the last token is computed, or there would be no next one"
    assert reused(2, [*prompt, 5]) == 4
    assert reused(3, [*prompt[:11], 90, *prompt[12:]]) == 2
    assert reused(4, [90, *prompt[1:]]) == 0, "the same tokens behind others are other blocks"
    assert reused(5, [9, 9, 9, 9, 8]) == 0
    assert reused(6, [9, 9, 9, 9, *prompt[4:]]) == 1, "and this also when others at this place are known"
    assert reused(7, prompt, 9) == 3
    assert reused(8, prompt + answer(prompt, 9)) == 6, (
        "answers are known as well: 8 of its 9 tokens were cached"
    )


@pytest.mark.parametrize(("policy", "n_stages"), [("max_util", 1), ("static", 1), ("static", 3)])
def test_those_that_start_together_share(policy: str, n_stages: int) -> None:
    """A sequence looks for known blocks again when its context goes on, and takes what another one has
    computed since then in place of its own."""
    engine = make_engine(n_blocks=60, policy=policy, reuse=True, n_stages=n_stages, max_num_tokens=12)
    sequences = [sequence(i, [*range(17), 60 + i, 5, 5], 6) for i in range(4)]
    for s in sequences:
        engine.add(s)
    run(engine)
    assert [s.output for s in sequences] == [answer(s.prompt, 6) for s in sequences]
    assert isinstance(engine.blocks, PrefixCache)
    # the second computes its fourth block in the same step as the first
    assert engine.blocks.reused_blocks == 3 + 4 + 4
    check_empty(engine)


def test_sequences_that_run_at_once_share() -> None:
    engine = make_engine(reuse=True, max_num_tokens=100)
    first, second = sequence(0, list(range(20)), 10), sequence(1, [*range(16), 50, 51], 10)
    engine.add(first)
    engine.step()
    engine.add(second)
    engine.step()
    assert first.blocks[:4] == second.blocks[:4]
    assert not set(first.blocks[4:]) & set(second.blocks[4:])
    engine.cancel(0)
    check_blocks(engine)
    run(engine)
    assert second.output == answer(second.prompt, 10)
    check_empty(engine)


def test_the_block_left_longest_ago_goes_first() -> None:
    cache = PrefixCache(8, SIZE)

    def compute(first: int) -> Sequence:
        s = sequence(0, [*range(first, first + 13)])
        s.blocks = cache.known(s)
        cache.hold(s.blocks)
        s.n_cached = len(s.blocks) * SIZE
        s.blocks += cache.take(4 - len(s.blocks))
        n_new, s.n_cached = 13 - s.n_cached, 13
        cache.publish([(s, n_new)])
        return s

    def n_known(first: int) -> int:
        s = sequence(0, [*range(first, first + 13)])
        known = cache.known(s)
        cache.hold(known)
        cache.give_back(known)
        return len(known)

    old, new = compute(0), compute(50)
    cache.give_back(old.blocks)
    cache.give_back(new.blocks)
    assert cache.n_free == 8
    cache.give_back(cache.take(3))  # two were free, one of the old sequence's had to go: its last
    assert (n_known(50), n_known(0)) == (3, 2)
    cache.give_back(cache.take(5))  # asked for last, the old ones are the younger now
    assert (n_known(0), n_known(50)) == (2, 1)
    held = compute(0)
    assert cache.n_free == 4
    cache.give_back(cache.take(4))
    assert n_known(50) == 0
    cache.give_back(held.blocks)
    assert n_known(0) == 3
