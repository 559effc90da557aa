"""Which part of a model a rank holds: the one place that splits layers, heads, rows, columns and experts.

Attention and dense layers are split over the TP group. The experts of a mixture are split over the group's EP
ranks, and each expert's intermediate rows over the `tp_size / ep_size` ranks that hold the same experts, as
in TensorRT-LLM. Sizes that do not divide are split as evenly as possible.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import NamedTuple

from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.tensor_shapes import tensor_shapes

ALL = slice(None)


def share(n: int, rank: int, size: int) -> slice:
    """Return the part of `n` items that `rank` of `size` holds; sizes differ by at most one."""
    return slice(n * rank // size, n * (rank + 1) // size)


def length(part: slice) -> int:
    """Return how many items a part has."""
    return int(part.stop - part.start)


@dataclass(frozen=True)
class RankLayout:
    """A rank's coordinates in its instance."""

    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    tp_rank: int = 0
    pp_rank: int = 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def layers(self, config: ModelConfig) -> range:
        return range(config.n_layers)[share(config.n_layers, self.pp_rank, self.pp_size)]

    def n_heads(self, config: ModelConfig) -> int:
        return config.n_heads // self.tp_size

    def kv_heads(self, config: ModelConfig) -> slice:
        """This rank's KV heads. With more ranks than KV heads, several ranks hold the same head."""
        first = config.n_kv_heads * self.tp_rank // self.tp_size
        return slice(first, first + max(1, config.n_kv_heads // self.tp_size))

    def vocabulary(self, config: ModelConfig) -> slice:
        return share(config.vocab_size, self.tp_rank, self.tp_size)

    def vocabulary_sizes(self, config: ModelConfig) -> list[int]:
        """Return the size of each TP rank's part of the vocabulary."""
        n = config.vocab_size
        return [len(range(n)[share(n, rank, self.tp_size)]) for rank in range(self.tp_size)]

    def experts(self, config: ModelConfig) -> range:
        return range(config.n_experts)[share(config.n_experts, self.tp_rank % self.ep_size, self.ep_size)]

    def part(self, name: str, config: ModelConfig) -> tuple[slice, slice]:
        """Return this rank's rows and columns of one of its parameters (`tensors`), by Hugging Face name."""
        rows, columns = self._matrix_part(name, config)
        return (rows, ALL) if name.endswith(".bias") else (rows, columns)

    def _matrix_part(self, name: str, config: ModelConfig) -> tuple[slice, slice]:
        d, latent = config.head_dim, config.latent
        size, rank, n_ranks = config.intermediate_size, self.tp_rank, self.tp_size
        if ".experts." in name:
            rank, n_ranks = rank // self.ep_size, n_ranks // self.ep_size
        elif ".shared_experts." in name:
            size = config.shared_size
        elif config.n_dense_layers:
            size = config.dense_size
        inner = share(size, rank, n_ranks)
        match name.split(".")[-2]:
            case "embed_tokens" | "lm_head":
                return self.vocabulary(config), ALL
            case "q_proj" | "q_b_proj":
                d = d if latent is None else latent.query_dim
                return share(config.n_heads * d, self.tp_rank, self.tp_size), ALL
            case "kv_b_proj" if latent is not None:
                d = latent.qk_nope_head_dim + latent.v_head_dim
                return share(config.n_heads * d, self.tp_rank, self.tp_size), ALL
            case "k_proj" | "v_proj":
                heads = self.kv_heads(config)
                return slice(heads.start * d, heads.stop * d), ALL
            case "o_proj":
                d = d if latent is None else latent.v_head_dim
                return ALL, share(config.n_heads * d, self.tp_rank, self.tp_size)
            case "gate_proj" | "up_proj" | "w1" | "w3" | "c_fc":
                return inner, ALL
            case "down_proj" | "w2" | "c_proj":
                return ALL, inner
            case "sinks":
                return share(config.n_heads, self.tp_rank, self.tp_size), ALL
            case _:  # norms and routers
                return ALL, ALL

    def adds_bias(self, name: str) -> bool:
        """Return whether this rank adds a projection's bias: of ranks that add up parts, only one does."""
        last = name.split(".")[-2]
        if last not in ("o_proj", "down_proj", "w2", "c_proj"):
            return True
        return (self.tp_rank // self.ep_size if ".experts." in name else self.tp_rank) == 0

    def tensors(self, config: ModelConfig) -> list[str]:
        """Return the names of the parameters that this rank holds a part of."""
        layers, experts = self.layers(config), self.experts(config)

        def is_own(name: str) -> bool:
            if name.startswith("model.embed_tokens"):
                return self.is_first_stage or (self.is_last_stage and config.tie_word_embeddings)
            if name.startswith("model.embed_positions"):
                return self.is_first_stage
            if not name.startswith("model.layers"):
                return self.is_last_stage
            expert = re.search(r"experts\.(\d+)", name)
            return int(name.split(".")[2]) in layers and (expert is None or int(expert[1]) in experts)

        return [name for name in tensor_shapes(config) if is_own(name)]

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the shape of this rank's part of each of its parameters (`tensors`)."""
        model_shapes, shapes = tensor_shapes(config), {}
        for name in self.tensors(config):
            parts = zip(model_shapes[name], self.part(name, config), strict=False)  # a vector has rows only
            shapes[name] = tuple(len(range(n)[part]) for n, part in parts)
        return shapes


class CachePiece(NamedTuple):
    """A part of a KV cache that moves from a rank of one instance to a rank of another in one message."""

    source: int  # rank in its instance
    dest: int  # rank in its instance
    layers: range  # of the model
    heads: range  # KV heads of the model


MAX_PIECES = 4  # for a stage's layers: the first pieces move while later layers are computed


def cuts(
    config: ModelConfig, sender: tuple[int, int], receiver: tuple[int, int], n_pieces: int = MAX_PIECES
) -> list[CachePiece]:
    """Cut a KV cache into messages between two layouts (TP size, PP size), each sender's part in `n_pieces`.

    Each receiver gets all layers and heads that it holds. Senders that hold the same heads share the
    receivers.
    """
    result = []
    for source_stage, dest_stage in itertools.product(range(sender[1]), range(receiver[1])):
        source_layers = RankLayout(sender[0], sender[1], pp_rank=source_stage).layers(config)
        dest_layers = RankLayout(receiver[0], receiver[1], pp_rank=dest_stage).layers(config)
        n = min(n_pieces, len(source_layers))
        first_source, first_dest = source_stage * sender[0], dest_stage * receiver[0]
        for layers in (
            _common(source_layers[share(len(source_layers), i, n)], dest_layers) for i in range(n)
        ):
            for dest in range(receiver[0]) if layers else ():
                needed = _kv_range(config, receiver[0], dest)
                sources: dict[range, list[int]] = {}
                for source in range(sender[0]):
                    if heads := _common(_kv_range(config, sender[0], source), needed):
                        sources.setdefault(heads, []).append(source)
                for heads, holders in sources.items():
                    source = holders[dest % len(holders)]
                    result.append(CachePiece(first_source + source, first_dest + dest, layers, heads))
    return result


def _kv_range(config: ModelConfig, tp_size: int, tp_rank: int) -> range:
    return range(config.n_kv_heads)[RankLayout(tp_size, tp_rank=tp_rank).kv_heads(config)]


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))
