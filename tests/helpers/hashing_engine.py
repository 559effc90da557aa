"""An engine whose model reads its tokens back from the KV cache.

The model's next token is a hash of the whole context as the cache holds it, or of what its windows reach. So
an answer is right only if every block that a sequence names still holds what that sequence, or one with the
same beginning, has put there.
"""

from __future__ import annotations

import zlib
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpillm.comms.transport import Buffer
from mpillm.engine.engine import Engine
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.schedule.engine_messages import PLAN
from mpillm.engine.schedule.host_blocks import BlockCopy
from mpillm.engine.schedule.prefix_cache import PrefixCache
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.sequence import UNREAD, Sequence
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.engine.shape.layout import RankLayout

VOCAB, SIZE = 97, 4  # tokens per block
POLICIES = ["max_util", "no_evict", "static"]
CHUNKINGS = ["off", "first_come_first_served", "equal_progress"]


def next_token(context: list[int]) -> int:
    return zlib.crc32(np.array(context, np.int32).tobytes()) % VOCAB


def answer(prompt: list[int], n: int, window: int = 0, partial_window: int = 0) -> list[int]:
    context = list(prompt)
    for _ in range(n):
        window_blocks = context[-partial_window:] if partial_window else []
        context.append(next_token(context[-window:] + window_blocks))
    return context[len(prompt) :]


class _Cache:
    def __init__(self, window: int) -> None:
        self.tables: dict[int, list[int]] = {}
        self._window = window
        self._memory: dict[tuple[int, int], int] = {}  # block and place in it: token
        self._host: dict[tuple[int, int], int] = {}  # likewise, of host blocks

    def put(self, slot: int, n_cached: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, n_cached):
            self._memory[self.tables[slot][position // SIZE], position % SIZE] = token

    def copy(self, copies: list[BlockCopy]) -> None:
        for block, host_block, is_load in copies:
            for place in range(SIZE):
                if is_load:
                    self._memory[block, place] = self._host[host_block, place]
                else:
                    self._host[host_block, place] = self._memory[block, place]

    def seen(self, slot: int, position: int) -> list[int]:
        first = max(0, position + 1 - self._window) if self._window else 0
        return [self._memory[self.tables[slot][p // SIZE], p % SIZE] for p in range(first, position + 1)]


class FakeGroups(Groups):
    """Takes steps to the model as messages.

    With several stages a step runs only when its tokens are asked for, perhaps long after.
    """

    def __init__(self, n_stages: int, random: np.random.Generator, window: int, partial_window: int) -> None:
        super().__init__(RankLayout(pp_size=n_stages))
        self._random = random
        self._messages: deque[Buffer] = deque()
        self._caches = [_Cache(window)]
        if partial_window:
            self._caches.append(_Cache(partial_window))
        self._last: dict[int, int] = {}  # by slot: what a row takes whose token the engine has not read

    def send_plan(self, step: Step) -> None:
        self._messages.append(PLAN.write(step))

    def take_tokens(self) -> list[int] | None:
        return self.run_oldest() if self._messages and self._random.random() < 0.5 else None

    def run_oldest(self) -> list[int]:
        step = PLAN.read(self._messages.popleft())
        first = 0
        self._caches[0].copy(step.copies)
        for span in step.spans:
            tokens = step.tokens[first : first + span.n_new]
            tokens = [self._last[span.slot] if token == UNREAD else token for token in tokens]
            sent_blocks = (span.n_blocks_sent, span.blocks), (span.n_window_blocks_sent, span.window_blocks)
            for cache, (n_blocks_sent, blocks) in zip(self._caches, sent_blocks, strict=False):
                cache.tables.setdefault(span.slot, [])[n_blocks_sent:] = blocks
                cache.put(span.slot, span.n_cached, tokens)
            first += span.n_new
        owners, positions = zip(
            *((span, span.n_cached + i) for span in step.spans for i in range(span.n_new)), strict=True
        )
        spans = [owners[row] for row in step.logits_rows]
        tokens = [
            next_token([token for cache in self._caches for token in cache.seen(s.slot, positions[row])])
            for s, row in zip(spans, step.logits_rows, strict=True)
        ]
        self._last |= {s.slot: token for s, token in zip(spans, tokens, strict=True)}
        return tokens


class FakeSampled:
    """Computes tokens when they are taken; with `random` they are ready some time after the start, as on a
    device."""

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
    window: int = 0,
    partial_window: int = 0,
    host_blocks: int = 0,
) -> Engine:
    """With a `partial_window` the window cache has no more blocks than sequences may hold at once."""
    chunked = chunking != "off"
    max_num_tokens = max_num_tokens if chunked else 64
    n_window_blocks = max_batch_size * (-(-partial_window // SIZE) + 2) + -(
        -max_num_tokens * n_stages // SIZE
    )
    info: Any = SimpleNamespace(
        kv_cache_tokens=n_blocks * SIZE,
        end_ids=(),
        stop_words=stop_words,
        vocab_size=VOCAB,
        max_seq_len=80,
        host_blocks=host_blocks,
        feature_layers=(),
        window_cache_tokens=n_window_blocks * SIZE if partial_window else 0,
        config=SimpleNamespace(widest_window=window, partial_window=partial_window),
    )
    config = SchedulerConfig(
        max_batch_size,
        max_num_tokens,
        SIZE,
        enable_chunked_context=chunked,
        batch_scheduler_policy=policy,
        context_chunking_policy=chunking if chunked else CHUNKINGS[1],
        enable_kv_cache_reuse=reuse,
    )
    random = np.random.default_rng(seed)
    worker: Any = FakeWorker(FakeGroups(n_stages, random, window, partial_window), n_ahead, random)
    return Engine(info, config, worker)


def sequence(i: int, prompt: list[int], n: int = 8, **options: Any) -> Sequence:
    return Sequence(i, prompt, n, options.pop("min_output", 0), SamplingParams(), **options)


def make_sequences(n: int, random: np.random.Generator) -> list[Sequence]:
    """Return sequences of which many begin alike."""
    beginnings = [random.integers(0, VOCAB, length).tolist() for length in (0, 9, 21)]
    prompts = [
        beginnings[random.integers(3)] + random.integers(0, VOCAB, random.integers(1, 20)).tolist()
        for _ in range(n)
    ]
    return [sequence(i, prompt, int(random.integers(1, 24))) for i, prompt in enumerate(prompts)]


def check_blocks(engine: Engine) -> None:
    """Check that each block is free, left for reuse, or held by as many sequences as the allocator counts."""
    held = [block for s in engine.scheduler.running for block in s.blocks[s.n_blocks_freed :]]
    assert not any(s.blocks for s in engine.scheduler.waiting)
    assert engine.blocks.n_free == engine.blocks.n_blocks - len(set(held))
    assert isinstance(engine.blocks, PrefixCache) or len(set(held)) == len(held)
    if engine.window_blocks is not None:
        window_blocks = engine.window_blocks.blocks
        held = [
            block for s in engine.scheduler.running for block in s.window_blocks[s.n_window_blocks_freed :]
        ]
        assert all(held) and window_blocks.n_free == window_blocks.n_blocks - len(set(held))
        assert isinstance(window_blocks, PrefixCache) or len(set(held)) == len(held)


def check_empty(engine: Engine) -> None:
    assert not engine.has_work()
    assert engine.blocks.n_free == engine.blocks.n_blocks
    assert sorted(engine.scheduler._slots) == list(range(engine.config.max_batch_size))
    assert engine.scheduler._n_promised == 0
    for allocator in (
        engine.blocks,
        *([engine.window_blocks.blocks] if engine.window_blocks is not None else []),
    ):
        blocks = allocator.take(allocator.n_blocks)
        assert sorted(blocks) == list(range(1, allocator.n_blocks + 1))
        allocator.give_back(blocks)


def run(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.has_work() and not engine._in_flight:
            return
        engine.step()
        check_blocks(engine)
    raise AssertionError("it does not end")
