"""Policy kv_cache_aware, with made prompts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mpillm.comms.messages import REQUEST, Batch, by_value
from mpillm.roles.pool import InstancePool
from mpillm.roles.prefix_pool import PrefixPool, PrefixRouting

BLOCK = 4


def pool(n: int, *, requests: int = 1000, tokens: int = 1 << 30, weight: int = 64) -> PrefixPool:
    made = PrefixPool([10 + i for i in range(n)], PrefixRouting(BLOCK, weight))
    for position in range(n):
        made.grant(position, requests, tokens)
    return made


def batch(*prompts: list[int]) -> Batch:
    rows = np.zeros(len(prompts), REQUEST)
    rows["id"] = range(len(prompts))
    rows["n_tokens"] = [len(prompt) for prompt in prompts]
    return Batch(rows, np.array([token for prompt in prompts for token in prompt], np.int32))


def send(made: InstancePool, *prompts: list[int], need: int = 1) -> list[int]:
    """Return the position that each prompt goes to; requests stay open."""
    positions: list[int] = made.assign(np.full(len(prompts), need), batch(*prompts)).tolist()
    return positions


def answered(made: InstancePool, *positions: int, need: int = 1) -> None:
    made.return_credits(np.array(positions), np.full(len(positions), need))


def prompt(name: int, n: int, rest: int = 0) -> list[int]:
    """Return `n` tokens that prompts of this name share, and `rest` that are in no other prompt."""
    return [*range(1000 * name, 1000 * name + n), *(random.getrandbits(30) for _ in range(rest))]


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    made = pool(3)
    for position in (0, 1, 2):  # idle instances take turns
        assert send(made, prompt(position, 8, 3)) == [position]
        answered(made, position)
    for name in (2, 0, 1, 1, 0, 2):
        assert send(made, prompt(name, 8, 3)) == [name]
        answered(made, name)


def test_the_longest_prefix_wins() -> None:
    made = pool(3)
    assert send(made, prompt(1, 8), prompt(2, 8)) == [0, 1]
    assert send(made, prompt(1, 8)) == [0]
    longer = [*prompt(1, 8), 7, 7, 7, 7, 7]
    assert send(made, longer) == [0]
    # Instance 1 gets the longer one, too, once it has the shorter one and instance 0 is full.
    made.free_requests[0] = 0
    assert send(made, longer) == [2]
    made.free_requests[0] = 1000
    assert send(made, longer)[0] in (0, 2)


def test_the_last_token_and_blocks_that_are_not_full_do_not_count() -> None:
    made = pool(2)
    assert send(made, prompt(1, BLOCK)) == [0]
    assert send(made, prompt(1, BLOCK)) == [1], "the last token must be computed, so nothing is reused"
    made = pool(2)
    assert send(made, prompt(1, BLOCK + 1)) == [0]
    assert send(made, prompt(1, BLOCK + 1)) == [0]
    made = pool(2)
    assert send(made, prompt(1, 7, 1)) == [0]
    assert send(made, [5, *prompt(1, 7)]) == [1], "the same tokens behind others are other blocks"


def test_open_requests_weigh_against_cached_blocks() -> None:
    made = pool(2, weight=4)
    assert [send(made, prompt(1, 9))[0] for _ in range(5)] == [0, 0, 0, 0, 1], "4 weigh as much as a prompt"
    # Half of the prompt is cached: half as many.
    made = pool(2, weight=4)
    assert send(made, prompt(2, 8, 1)) == [0]
    assert [send(made, prompt(2, 4, 5))[0] for _ in range(2)] == [0, 1]


def test_without_common_beginnings_the_load_decides() -> None:
    made = pool(3)
    sent = send(made, *(prompt(name, 9) for name in range(30)))
    assert [sent.count(position) for position in range(3)] == [10, 10, 10]


def test_a_full_instance_is_passed_over_whatever_it_has() -> None:
    made = pool(2, requests=1)
    assert send(made, prompt(1, 9), prompt(1, 9), prompt(1, 9)) == [0, 1]
    assert send(made, prompt(1, 9)) == []
    answered(made, 1)
    assert send(made, prompt(1, 9)) == [1]
    made = pool(2, tokens=100)
    assert send(made, prompt(1, 9), need=60) == [0]
    assert send(made, prompt(1, 9), prompt(1, 9), need=60) == [1]
    assert send(made, prompt(1, 9), need=40) != []


def test_the_blocks_unused_the_longest_are_forgotten_first_and_a_prompt_from_its_end() -> None:
    # An instance of 4 blocks, granted twice.
    made = pool(2, tokens=2 * 4 * BLOCK)
    held = made._blocks[0]
    made._remember(0, [1, 2, 3])
    made._remember(0, [4, 5])
    assert list(held) == [2, 1, 5, 4]
    made._remember(0, [1, 6])
    assert list(held) == [5, 4, 6, 1]
    assert made._holders == {1: 1, 4: 1, 5: 1, 6: 1}
    made._remember(1, [1, 9])
    made._remember(0, [11, 12, 13, 14])
    assert made._holders == {11: 1, 12: 1, 13: 1, 14: 1, 1: 2, 9: 2}


def test_as_many_holders_as_instances_are_not_all_compared() -> None:
    made = pool(300)
    shared = prompt(1, 9)
    for position in range(300):
        made._remember(position, made._hashes(np.array(shared, np.int32), 0))
    sent = send(made, *[shared] * 600)
    assert [sent.count(position) for position in range(300)] == [2] * 300


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_that_of_the_formula(seed: int) -> None:
    """A comparison of all instances chooses the same, for prompts of a few families."""
    chance = random.Random(seed)
    made, n = pool(4, weight=8), 4
    known: list[set[tuple[int, ...]]] = [set() for _ in range(n)]
    open_: list[int] = []
    for _ in range(300):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 30))]
        blocks = [tuple(tokens[: end + BLOCK]) for end in range(0, (len(tokens) - 1) // BLOCK * BLOCK, BLOCK)]

        def score(position: int, blocks: list[tuple[int, ...]] = blocks) -> float:
            cached = 0
            while cached < len(blocks) and blocks[cached] in known[position]:
                cached += 1
            return cached / max(1, len(blocks)) - open_.count(position) / 8

        scores = [score(position) for position in range(n)]
        (chosen,) = send(made, tokens)
        assert scores[chosen] == pytest.approx(max(scores)), (scores, chosen)
        known[chosen].update(blocks)
        open_.append(chosen)
        while open_ and chance.random() < 0.5:
            answered(made, open_.pop(chance.randrange(len(open_))))


def test_requests_of_one_batch_for_several_instances() -> None:
    made = batch([1], [2, 2], [], [3, 3, 3], [4])
    parts = by_value(np.array([7, 5, 7, 5, 6]), made)
    assert [(value, part.rows["id"].tolist(), part.tokens.tolist()) for value, part in parts] == [
        (5, [1, 3], [2, 2, 3, 3, 3]),
        (6, [4], [4]),
        (7, [0, 2], [1]),
    ]
    ((value, same),) = by_value(np.full(5, 3), made)
    assert value == 3 and same is made


def test_prompts_with_different_salts_share_nothing() -> None:
    made = pool(2)
    alike = batch(prompt(1, 4 * BLOCK), prompt(1, 4 * BLOCK), prompt(1, 4 * BLOCK))
    alike.rows["salt"] = [5, 6, 5]
    assert made.assign(np.ones(3, np.int64), alike).tolist() == [0, 1, 0]


def test_forgotten_prompts_attract_nothing() -> None:
    made = pool(3)
    (first,) = send(made, list(range(40)))
    answered(made, first)
    assert send(made, [*range(40), 7]) == [first], "its beginning is cached there"
    answered(made, first)
    made.forget_prompts()
    assert send(made, [*range(40), 8]) != [first], "the instance that was used longest ago"
