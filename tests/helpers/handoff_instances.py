"""Instances whose KV caches move, in any layout."""

from __future__ import annotations

import dataclasses

import torch

from mpillm.comms.mover import Peer
from mpillm.engine.cache.kv_cache import KVCache
from mpillm.engine.handoff.transfers import Transfers
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.read_config import load_model_config
from tests.helpers.loopback import Wire


def model(n_layers: int) -> ModelConfig:
    return dataclasses.replace(load_model_config("tiny-llama"), n_layers=n_layers)


def layouts(size: tuple[int, int]) -> list[RankLayout]:
    """Return the layout of each rank of an instance, in rank order."""
    tp, pp = size
    return [
        RankLayout(tp, pp, tp_rank=tp_rank, pp_rank=pp_rank) for pp_rank in range(pp) for tp_rank in range(tp)
    ]


class Instance:
    """Holds the caches and transfers of an instance's ranks.

    `value` says what a context instance's caches contain.
    """

    def __init__(
        self,
        wire: Wire,
        config: ModelConfig,
        size: tuple[int, int],
        rank: int,
        peer: Peer,
        tokens_per_block: int,
        sends: bool,
    ):
        self.config, self.sends, self.rank, self.peer = config, sends, rank, peer
        self.layouts = layouts(size)
        self.caches: list[KVCache] = []
        self.transfers: list[Transfers] = []
        for i, layout in enumerate(self.layouts):
            heads = layout.kv_heads(config)
            n_heads = heads.stop - heads.start
            cache = KVCache(
                len(layout.layers(config)), 12, n_heads, tokens_per_block, config.head_dim, torch.float32
            )
            self.caches.append(cache)
            self.transfers.append(
                Transfers(cache, config, layout, wire.mover(rank + i), {9: peer}, sends=sends)
            )

    def store(self, i: int, layer: int, blocks: list[int], n_tokens: int) -> None:
        """Let rank i compute a layer of its own."""
        cache, layout = self.caches[i], self.layouts[i]
        for pool, is_value in ((cache.keys, 0), (cache.values, 1)):
            for token in range(n_tokens):
                block, at = blocks[token // cache.tokens_per_block], token % cache.tokens_per_block
                for j, head in enumerate(range(self.config.n_kv_heads)[layout.kv_heads(self.config)]):
                    pool[layer, block, j, at] = value(
                        is_value, layout.layers(self.config)[layer], head, token
                    )

    def check(self, blocks: list[int], n_tokens: int) -> None:
        """Check that every rank holds what it should, and that nothing else was written."""
        for i, cache in enumerate(self.caches):
            expected = KVCache(
                cache.keys.shape[0],
                12,
                cache.keys.shape[2],
                cache.tokens_per_block,
                self.config.head_dim,
                torch.float32,
            )
            found, self.caches[i] = cache, expected
            for layer in range(len(self.layouts[i].layers(self.config))):
                self.store(i, layer, blocks, n_tokens)
            assert torch.equal(found.keys, expected.keys)
            assert torch.equal(found.values, expected.values)


def value(is_value: int, layer: int, head: int, token: int) -> float:
    return 1 + is_value + 2 * (layer + 10 * (head + 10 * token))
