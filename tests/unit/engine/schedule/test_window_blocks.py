"""Layers with a window hold only what it reaches, where others hold all: answers are as if all did."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpillm.engine.cache.kv_cache import CachedBlocks, KVCache
from mpillm.engine.cache.two_caches import TwoCaches
from mpillm.engine.schedule.block_allocator import NULL_BLOCK
from mpillm.engine.schedule.prefix_cache import PrefixCache
from mpillm.engine.shape.read_config import load_model_config
from tests.helpers.families import make_family
from tests.helpers.gpu_steps_on_cpu import GpuCore
from tests.helpers.hashing_engine import (
    CHUNKINGS,
    POLICIES,
    answer,
    check_empty,
    make_engine,
    make_sequences,
    run,
    sequence,
)
from tests.helpers.torch_cores import answer as answers
from tests.helpers.torch_cores import make_batch, make_core


@pytest.mark.parametrize(("n_stages", "n_ahead"), [(1, 0), (1, 1), (3, 0)])
@pytest.mark.parametrize(("policy", "chunking"), list(itertools.product(POLICIES, CHUNKINGS)))
@pytest.mark.parametrize("reuse", [False, True])
def test_answers(policy: str, chunking: str, reuse: bool, n_stages: int, n_ahead: int) -> None:
    """In every step order, with evictions, and with no more window blocks than the most that are held."""
    for seed, window in enumerate((1, 3, 6, 13)):
        random = np.random.default_rng(seed)
        options: Any = {"n_stages": n_stages, "n_ahead": n_ahead, "seed": seed, "partial_window": window}
        engine = make_engine(24, policy, chunking, reuse, **options)
        sequences = make_sequences(20, random)
        for i, one in enumerate(sequences):
            engine.add(one)
            if i % 7 == 6:
                engine.step()
        run(engine)
        for one in sequences:
            assert one.output == answer(one.prompt, one.max_output, partial_window=window), one.id
        check_empty(engine)


def test_what_is_reused() -> None:
    """A beginning that the other layers know is reused if the window blocks of its last window are there."""
    engine = make_engine(60, reuse=True, max_num_tokens=100, max_batch_size=2, partial_window=6)
    assert engine.window_blocks is not None
    window_blocks = engine.window_blocks.blocks
    assert isinstance(window_blocks, PrefixCache)
    first = sequence(0, list(range(41)), 1)
    engine.add(first)
    run(engine)
    again = sequence(1, list(range(41)), 3)
    engine.add(again)
    engine.step()
    assert again.n_reused == 10 * 4 and again.window_blocks[:8] == [0] * 8 and all(again.window_blocks[8:])
    run(engine)
    window_blocks.give_back(window_blocks.take(window_blocks.n_blocks))  # nothing in it is known any more
    for i, n_reused in ((2, 0), (3, 10)):
        other = sequence(i, list(range(41)), 2)
        engine.add(other)
        run(engine)
        assert other.n_reused == n_reused * 4 and other.output == answer(other.prompt, 2, partial_window=6)
    check_empty(engine)


PROMPTS = [[3 + (7 * i + 5 * j * j) % 300 for j in range(3 + 7 * i)] for i in range(8)]


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("options", [{}, {"max_num_tokens": 7}, {"enable_kv_cache_reuse": True}], ids=str)
@pytest.mark.long
def test_families(tmp_path: Path, name: str, options: dict[str, int]) -> None:
    pytest.importorskip("transformers")
    make_family(name, tmp_path)
    wanted = answers(make_core(tmp_path, dtype="float32"), make_batch(PROMPTS, max_output=20))
    of = {"max_batch_size": 3, "max_num_tokens": 64, "tokens_per_block": 4, "kv_cache_tokens": 512}
    core = make_core(tmp_path, kind=GpuCore, dtype="float32", gpu_bytes=8 << 30, **of | options)
    assert 0 < core.info.window_cache_tokens < core.info.kv_cache_tokens
    assert answers(core, make_batch(PROMPTS, max_output=20)) == wanted
    assert (
        core.engine.window_blocks is not None
        and core.engine.window_blocks.blocks.n_free == core.engine.window_blocks.blocks.n_blocks
    )


def test_where_window_blocks_are(tmp_path: Path) -> None:
    """Where some layers have a window and others have none; so many of each in a stage, at most."""
    for name, window in (("MistralForCausalLM", 0), ("GptOssForCausalLM", 12), ("LlamaForCausalLM", 0)):
        make_family(name, tmp_path / name)
        config = load_model_config(str(tmp_path / name))
        assert config.partial_window == window
        for pp in (1, 2):
            n_window_layers, n_others = (
                config.kv_layers(pp, windowed=windowed) for windowed in (True, False)
            )
            assert config.n_layers <= pp * (n_window_layers + n_others)


def test_two_caches_are_handed_over_as_one() -> None:
    """Of layers with a window only what window blocks are for arrives, from one cache or from two."""
    n_tokens, layers, heads = 10, slice(1, 5), slice(0, 2)
    one = KVCache(5, 9, 2, 4, 8, torch.float32)
    for pool in one.pools:
        pool.normal_()
    places = [(False, 0), (True, 0), (True, 1), (False, 1), (True, 2)]
    two, third = (
        TwoCaches((KVCache(2, 9, 2, 4, 8, torch.float32), KVCache(3, 3, 2, 4, 8, torch.float32)), places)
        for _ in range(2)
    )
    there, here = CachedBlocks([3, 8, 2], n_tokens), CachedBlocks([5, 1, 7], n_tokens, [NULL_BLOCK, 3, 1])
    pieces = one.read([there], layers, heads)
    assert pieces[0].numel() == two.piece_bytes(n_tokens, layers, heads)
    two.write([here], layers, heads, pieces)
    third.write([here], layers, heads, two.read([here], layers, heads))
    for layer in range(5):
        windowed, at = places[layer]
        for caches in (two.caches, third.caches):
            for pool, found in zip(one.pools, caches[windowed].pools, strict=True):
                for token in range(4 if windowed else 0, n_tokens):
                    block = (here.window_blocks if windowed else here.blocks)[token // 4]
                    wanted = pool[layer, there.blocks[token // 4], :, token % 4]
                    assert torch.equal(found[at, block, :, token % 4], wanted) == (layer > 0)
