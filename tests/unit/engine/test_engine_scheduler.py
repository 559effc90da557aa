"""Policies, chunking, block reuse and cancelling: the engine with a model that reads its tokens back from the
KV cache.

The model's next token is a hash of the whole context as the cache holds it. So an answer is right only if
every block that a sequence names still holds what that sequence, or one with the same beginning, has put
there.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpillm.comms.transport import Buffer
from mpillm.engine.cache.kv_cache import BlockAllocator
from mpillm.engine.cache.prefix_cache import PrefixCache
from mpillm.engine.engine import Engine, EngineLimits
from mpillm.engine.engine_messages import PLAN
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.parallel.layout import Layout
from mpillm.engine.sampler import SamplingParams
from mpillm.engine.scheduler import Scheduler
from mpillm.engine.sequence import UNREAD, Sequence
from mpillm.engine.step import Step

VOCAB, SIZE = 97, 4  # tokens per block
POLICIES = ["max_util", "no_evict", "static"]
CHUNKINGS = ["off", "first_come_first_served", "equal_progress"]


def next_token(context: list[int]) -> int:
    return zlib.crc32(np.array(context, np.int32).tobytes()) % VOCAB


def answer(prompt: list[int], n: int) -> list[int]:
    context = list(prompt)
    for _ in range(n):
        context.append(next_token(context))
    return context[len(prompt) :]


class FakeGroups(Groups):
    """Steps reach the model as messages.

    With several stages they do so only when their tokens are asked for, perhaps long after.
    """

    def __init__(self, n_stages: int, random: np.random.Generator) -> None:
        super().__init__(Layout(pp_size=n_stages))
        self._random = random
        self._messages: deque[Buffer] = deque()
        self._tables: dict[int, list[int]] = {}
        self._memory: dict[tuple[int, int], int] = {}  # block and place in it: token
        self._last: dict[int, int] = {}  # by slot: what a row takes whose token the engine has not read

    def send_plan(self, step: Step) -> None:
        self._messages.append(PLAN.write(step))

    def take_tokens(self) -> list[int] | None:
        return self.run_oldest() if self._messages and self._random.random() < 0.5 else None

    def run_oldest(self) -> list[int]:
        step = PLAN.read(self._messages.popleft())
        first = 0
        for span in step.spans:
            blocks = self._tables.setdefault(span.slot, [])
            blocks[span.n_told :] = span.blocks
            for i in range(span.n_new):
                position = span.n_cached + i
                token = step.tokens[first + i]
                self._memory[blocks[position // SIZE], position % SIZE] = (
                    self._last[span.slot] if token == UNREAD else token
                )
            first += span.n_new
        ends = np.cumsum([span.n_new for span in step.spans]) - 1
        spans = [step.spans[int(np.flatnonzero(ends == row)[0])] for row in step.wanted]
        tokens = [
            next_token(
                [self._memory[self._tables[s.slot][p // SIZE], p % SIZE] for p in range(s.n_cached + s.n_new)]
            )
            for s in spans
        ]
        self._last |= {s.slot: token for s, token in zip(spans, tokens, strict=True)}
        return tokens


class FakeSampled:
    """Computed when it is taken; with `random`, as on a device, some time after it was started."""

    def __init__(self, groups: FakeGroups, random: np.random.Generator | None) -> None:
        self._groups = groups
        self._random = random

    def ready(self) -> bool:
        return self._random is None or self._random.random() < 0.5

    def take(self) -> list[int]:
        return self._groups.run_oldest()


class FakeWorker:
    def __init__(self, groups: FakeGroups, n_ahead: int, random: np.random.Generator) -> None:
        self.part, self.steps = SimpleNamespace(groups=groups), SimpleNamespace(n_ahead=n_ahead)
        self.peers = groups
        self._random = random

    def run(self, step: Step) -> FakeSampled | None:
        if self.peers.layout.pp_size > 1:
            return None
        return FakeSampled(self.peers, self._random if self.steps.n_ahead else None)


def make_engine(
    n_blocks: int = 24,
    policy: str = "max_util",
    chunking: str = "first_come_first_served",
    reuse: bool = False,
    n_stages: int = 1,
    max_batch_size: int = 6,
    max_num_tokens: int = 20,
    stop_words: tuple[tuple[int, ...], ...] = (),
    seed: int = 0,
    n_ahead: int = 0,
) -> Engine:
    info: Any = SimpleNamespace(
        kv_cache_tokens=n_blocks * SIZE, end_ids=(), stop_words=stop_words, vocab_size=VOCAB, max_seq_len=80
    )
    chunked = chunking != "off"
    limits = EngineLimits(
        max_batch_size,
        max_num_tokens if chunked else 64,
        SIZE,
        chunked,
        policy,
        chunking if chunked else CHUNKINGS[1],
        reuse,
    )
    random = np.random.default_rng(seed)
    worker: Any = FakeWorker(FakeGroups(n_stages, random), n_ahead, random)
    return Engine(info, limits, worker)


def sequence(i: int, prompt: list[int], n: int = 8, **options: Any) -> Sequence:
    return Sequence(i, prompt, n, options.pop("min_output", 0), SamplingParams(), **options)


def make_sequences(n: int, random: np.random.Generator) -> list[Sequence]:
    """Prompts of which many begin alike."""
    beginnings = [random.integers(0, VOCAB, length).tolist() for length in (0, 9, 21)]
    prompts = [
        beginnings[random.integers(3)] + random.integers(0, VOCAB, random.integers(1, 20)).tolist()
        for _ in range(n)
    ]
    return [sequence(i, prompt, int(random.integers(1, 24))) for i, prompt in enumerate(prompts)]


def check_blocks(engine: Engine) -> None:
    """Each block is free, left for reuse, or held, by as many as the allocator counts."""
    held = [block for s in engine.scheduler.running for block in s.blocks]
    assert not any(s.blocks for s in engine.scheduler.waiting)
    assert engine.blocks.n_free == engine.blocks.n_blocks - len(set(held))
    assert isinstance(engine.blocks, PrefixCache) or len(set(held)) == len(held)


def check_empty(engine: Engine) -> None:
    assert not engine.has_work()
    assert engine.blocks.n_free == engine.blocks.n_blocks
    assert sorted(engine.scheduler._slots) == list(range(engine.limits.max_batch_size))
    assert engine.scheduler._n_owed == 0
    blocks = engine.blocks.take(engine.blocks.n_blocks)
    assert sorted(blocks) == list(range(1, engine.blocks.n_blocks + 1))
    engine.blocks.give_back(blocks)


@pytest.mark.parametrize(("n_stages", "n_ahead"), [(1, 0), (1, 1), (2, 0), (3, 0)])
@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_answer_is_right_and_every_block_comes_back(
    policy: str, chunking: str, reuse: bool, n_stages: int, n_ahead: int
) -> None:
    """Requests come at random and some are cancelled at random, wherever they are then."""
    random = np.random.default_rng(zlib.crc32(f"{policy} {chunking} {reuse} {n_stages}".encode()))
    engine = make_engine(
        policy=policy, chunking=chunking, reuse=reuse, n_stages=n_stages, n_ahead=n_ahead, seed=1
    )
    sequences = make_sequences(60, random)
    to_come, cancelled = deque(sequences), set()
    firsts: set[int] = set()
    ended: dict[int, bool] = {}  # whether the end was that of a cancelled one
    for _ in range(20_000):
        if to_come and random.random() < 0.3:
            assert engine.refusal(to_come[0]) is None
            engine.add(to_come.popleft())
        if random.random() < 0.15:
            n_added = len(sequences) - len(to_come)
            # some have ended, and one is not there yet
            chosen = int(random.integers(max(0, n_added - 10), n_added + 1))
            engine.cancel(chosen)
            engine.cancel(chosen)
            if chosen < n_added and chosen not in ended:
                cancelled.add(chosen)
        for s, is_first, is_final in engine.step():
            assert s.id not in ended
            if is_first:
                assert s.id not in firsts
                firsts.add(s.id)
            if is_final:
                ended[s.id] = s.is_cancelled
        check_blocks(engine)
        if not to_come and len(ended) == len(sequences):
            break
    assert set(ended) == set(range(60))
    assert {i for i, was_cancelled in ended.items() if was_cancelled} == cancelled
    assert 5 < len(cancelled) < 55
    for s in sequences:
        wanted = answer(s.prompt, s.max_output)
        assert s.output == wanted or (s.is_cancelled and s.output == wanted[: len(s.output)])
    check_empty(engine)
    if policy != "max_util":
        assert engine.scheduler.preemptions == 0
    if isinstance(engine.blocks, PrefixCache):
        assert engine.blocks.reused_blocks > 0


def run(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.has_work() and not engine._in_flight:
            return
        engine.step()
        check_blocks(engine)
    raise AssertionError("it does not end")


# --- policies ---


@pytest.mark.parametrize("policy", POLICIES)
def test_who_evicts(policy: str) -> None:
    engine = make_engine(n_blocks=20, policy=policy)
    for i in range(10):
        engine.add(sequence(i, [i] * 10, 40))
    run(engine)
    check_empty(engine)
    assert (engine.scheduler.preemptions > 0) == (policy == "max_util")


def test_no_evict_starts_what_can_end() -> None:
    """Blocks for a context of 10 and 30 answers are 10: of 25 blocks two sequences can be sure, a third must
    wait until one has ended."""
    engine = make_engine(n_blocks=25, policy="no_evict")
    for i in range(3):
        engine.add(sequence(i, [i] * 10, 31))
    for _ in range(3):
        engine.step()
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (2, 1)
    engine.cancel(0)
    engine.step()
    assert [s.id for s in engine.scheduler.running] == [1, 2]


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("n_stages", [1, 2])
def test_a_static_batch_runs_to_its_end(chunking: str, n_stages: int) -> None:
    engine = make_engine(n_blocks=60, policy="static", chunking=chunking, n_stages=n_stages)
    random = np.random.default_rng(3)
    for s in make_sequences(40, random):
        engine.add(s)
    batches: list[set[int]] = []
    ended: set[int] = set()
    while engine.has_work() or engine._in_flight:
        ended |= {s.id for s, _, is_final in engine.step() if is_final}
        running = {s.id for s in engine.scheduler.running}
        if not batches or not running <= batches[-1]:
            assert not batches or batches[-1] <= ended, "somebody came before the batch had ended"
            batches.append(running)
    assert ended == set(range(40))
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(40))
    assert max(map(len, batches)) == engine.limits.max_batch_size, "a batch is not what fits one step"


# --- chunking ---


def chunks(chunking: str, lengths: list[int], max_num_tokens: int, n_in_flight: int = 1) -> list[int]:
    """Return tokens of each sequence in the first step."""
    scheduler = Scheduler(
        BlockAllocator(1000), SIZE, 16, max_num_tokens, True, n_in_flight, "max_util", chunking
    )
    for i, n in enumerate(lengths):
        scheduler.add(sequence(i, [1] * n))
    found = dict.fromkeys(range(len(lengths)), 0) | {s.id: n for s, n in scheduler.plan()}
    return list(found.values())


def test_chunks() -> None:
    assert chunks("first_come_first_served", [100, 10, 50, 3], 40) == [40, 0, 0, 0]
    assert chunks("first_come_first_served", [20, 10, 50, 3], 40) == [20, 10, 10, 0]
    assert chunks("equal_progress", [100, 10, 50, 3], 40) == [14, 10, 13, 3]
    assert chunks("equal_progress", [100, 100, 100], 40) == [14, 13, 13]
    assert chunks("equal_progress", [5, 6, 7], 40) == [5, 6, 7]
    assert chunks("equal_progress", [50] * 5, 3) == [1, 1, 1, 0, 0]
    assert chunks("equal_progress", [50] * 5, 30, n_in_flight=2) == [10, 10, 10, 0, 0]


def test_equal_progress_is_equal() -> None:
    """In each step those that want more get the same, but for one token, and a step is full as long as
    somebody wants more."""
    scheduler = Scheduler(BlockAllocator(1000), SIZE, 16, 50, True, 1, "max_util", "equal_progress")
    sequences = [sequence(i, [1] * n) for i, n in enumerate([300, 90, 200, 40])]
    for s in sequences:
        scheduler.add(s)
    while any(s.n_uncached > 1 for s in sequences):
        plan = scheduler.plan()
        Step.of(plan)
        more = [n for s, n in plan if s.n_uncached]
        assert not more or (sum(n for _, n in plan) == 50 and max(more) - min(more) <= 1)
        for s in sequences:
            if s.n_uncached == 0 and not s.output:
                s.output.append(1)


# --- block reuse ---


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
    """A sequence looks again when its context goes on: what another has computed since it started takes the
    place of its own blocks."""
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
        s.blocks = cache.take_known(s)
        s.n_cached = len(s.blocks) * SIZE
        s.blocks += cache.take(4 - len(s.blocks))
        n_new, s.n_cached = 13 - s.n_cached, 13
        cache.publish([(s, n_new)])
        return s

    def n_known(first: int) -> int:
        s = sequence(0, [*range(first, first + 13)])
        known = cache.take_known(s)
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


# --- stop words ---


def test_stop_words() -> None:
    prompt = [3, 1, 4]
    whole = answer(prompt, 20)
    words = (tuple(whole[4:7]), (whole[9],), (96, *whole[11:13]), tuple(whole[15:17]), (prompt[-1], whole[0]))

    def ends(min_output: int) -> int:
        engine = make_engine(stop_words=words)
        s = sequence(0, prompt, 20, min_output=min_output)
        engine.add(s)
        run(engine)
        check_empty(engine)
        assert s.output == whole[: len(s.output)]
        return len(s.output)

    assert len(set(whole[:17])) == 17, "a word must not come twice in this answer"
    assert [ends(n) for n in (0, 7, 8, 10, 11, 17, 18)] == [7, 7, 10, 10, 17, 17, 20]


# --- cancelling ---


def test_cancel_a_request_that_waits() -> None:
    engine = make_engine(max_batch_size=1)
    engine.add(sequence(0, [1] * 5, 3))
    engine.add(sequence(1, [2] * 5, 3))
    engine.step()
    engine.cancel(1)
    assert [(p.sequence.id, p.is_first, p.is_final) for p in engine.step()] == [(1, False, True)]
    run(engine)
    check_empty(engine)


def test_cancel_a_request_in_its_context() -> None:
    engine = make_engine(max_num_tokens=4)
    engine.add(sequence(0, [1] * 15, 3))
    engine.step()
    assert 0 < engine.scheduler.running[0].n_cached < 15
    engine.cancel(0)
    assert engine.has_work()
    assert [(p.sequence.id, p.is_first, p.is_final) for p in engine.step()] == [(0, False, True)]
    check_empty(engine)


@pytest.mark.parametrize("n_steps", [1, 4])
def test_a_request_in_flight_keeps_its_blocks_until_its_step_has_ended(n_steps: int) -> None:
    engine = make_engine(n_stages=2)
    s = sequence(0, [1] * 10, 9)
    engine.add(s)
    for _ in range(200):
        engine.step()
        if len(s.output) >= n_steps - 1 and s.in_flight:
            break
    engine.cancel(0)
    engine.cancel(0)
    assert s.in_flight and s.blocks
    check_blocks(engine)
    told = []
    for _ in range(200):
        told += engine.step()
    assert [(p.sequence.id, p.is_first, p.is_final) for p in told] == [(0, False, True)]
    check_empty(engine)
