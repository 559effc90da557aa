"""Check before loading whether a model fits the memory of its node, or of its GPUs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from disagg.errors import ConfigError
from mpillm.engine.shape.dtypes import N_BYTES
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.entries import rank_bytes
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.quantization import weight_type
from mpillm.engine.shape.speculative_config import decode_rows

_MAX_COPIED_ROWS = 1 << 16  # rows
PADDED = 64  # rows of a sequence that are copied begin and end at multiples of it
# Rows of logits that are copied together. Choosing a token other than the likeliest takes float32, sorts the
# vocabulary, and sums in float64. On an H200, that takes up to 69 bytes per logit (tests/gpu measures it). A
# batch of 1,024 rows would take 9 GB.
CHOSEN_AT_ONCE = 64
BYTES_TO_CHOOSE = 72
# Bytes: CUDA's context, kernels, the libraries' own memory, and PyTorch's rounding up.
_GPU_OVERHEAD = 3 << 29
# Most rows of a step with contexts whose layers are graphs. For more rows, an H200 takes longer than its host
# takes for the launches, with every model.
MAX_GRAPH_ROWS = 1024


@dataclass(frozen=True)
class GpuNeeds:
    """Bytes of one GPU that an engine takes beside its KV cache, and for each token in the cache."""

    weights: int
    step: int
    per_token: int

    def __add__(self, other: GpuNeeds) -> GpuNeeds:
        return GpuNeeds(
            self.weights + other.weights, self.step + other.step, self.per_token + other.per_token
        )


def gpu_needs(
    config: EngineConfig, model: ModelConfig, dtype: str, kv_dtype: str, quantization: str
) -> GpuNeeds:
    """Return what each GPU of an instance needs at most. `quantization`: of the weights in memory."""
    width = N_BYTES[dtype]
    ranks = [(tp_rank, pp_rank) for tp_rank in range(config.tp_size) for pp_rank in range(config.pp_size)]
    layouts = [RankLayout(config.tp_size, config.pp_size, config.ep_size, *rank) for rank in ranks]
    weights = max(rank_bytes(model, layout, dtype, quantization) for layout in layouts)
    heads = model.n_heads + 2 * max(model.n_kv_heads, config.tp_size)
    # A mixture has its feed-forward's values and its output for each chosen expert, whichever rank holds it.
    n_chosen = model.n_experts_per_token if model.n_experts else 1
    inner = 3 * n_chosen * model.intermediate_size * config.ep_size
    per_row = (3 + n_chosen) * model.hidden_size + (2 * heads * model.head_dim + inner) // config.tp_size
    n_rows = decode_rows(config)
    # Graphs keep the memory of their largest step; other steps need memory beside it.
    n_tokens = config.scheduler.max_num_tokens
    in_graphs = max(n_rows, min(n_tokens, MAX_GRAPH_ROWS))
    step = width * per_row * (max(n_tokens, n_rows) + in_graphs)
    step += model.vocab_size * (width * n_rows + BYTES_TO_CHOOSE * min(n_rows, CHOSEN_AT_ONCE))
    # Contexts that attention copies out of their blocks, a layer at a time.
    copied_row = width * 2 * max(1, model.n_kv_heads // config.tp_size) * model.head_dim
    step += copied_row * max_copied_rows(config.max_seq_len or model.max_position_embeddings)
    return GpuNeeds(weights, step, model.kv_bytes_per_token(kv_dtype, config.tp_size, config.pp_size))


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a KV cache on a rank, per token: in layers without and with a window (see `WindowBlocks`).

    Layers with a window have their own cache if `max_window_tokens`, the tokens that sequences can hold in
    it, are fewer than in the other cache.
    """

    per_token: int  # in all layers without a window
    window_bytes: int = 0
    max_window_tokens: int = 0

    def of(self, n_tokens: int) -> int:
        return n_tokens * self.per_token + min(n_tokens, self.max_window_tokens) * self.window_bytes

    def tokens_in(self, n_bytes: int) -> int:
        together = n_bytes // (self.per_token + self.window_bytes)
        if together <= self.max_window_tokens or not self.window_bytes:
            return together
        return (n_bytes - self.max_window_tokens * self.window_bytes) // self.per_token

    def window_cache_tokens(self, n_tokens: int) -> int:
        """Return the tokens of the window layers' own cache beside one of `n_tokens`; 0: there is none."""
        return self.max_window_tokens if self.window_bytes and self.max_window_tokens < n_tokens else 0


def cache_bytes(config: EngineConfig, model: ModelConfig, kv_dtype: str, per_token: int) -> CacheBytes:
    """Return the bytes that an instance's KV cache takes on a GPU.

    `per_token`: of all layers, and of a draft model or head. A context instance has one cache, because a
    handoff sends the blocks of all layers.
    """
    if config.role == "context" or not model.partial_window:
        return CacheBytes(per_token)
    tp, pp, scheduler = config.tp_size, config.pp_size, config.scheduler
    size = scheduler.tokens_per_block
    of_layer = model.kv_bytes_per_token(kv_dtype, tp, model.n_layers)
    n_all = -(-model.n_layers // pp)
    n_window_layers, n_others = (model.kv_layers(pp, windowed=windowed) for windowed in (True, False))
    # Each sequence's window, whose ends may be in the middle of blocks, and the tokens that steps in flight
    # add.
    n_blocks = scheduler.max_batch_size * (-(-model.partial_window // size) + 2)
    n_blocks += -(-scheduler.max_num_tokens * pp // size)
    if scheduler.enable_kv_cache_reuse:
        n_blocks *= 2  # blocks without a sequence stay cached
    return CacheBytes(per_token - (n_all - n_others) * of_layer, n_window_layers * of_layer, n_blocks * size)


def free_cache_bytes(config: EngineConfig, needs: GpuNeeds, free: int) -> int:
    """Return how many of the `free` bytes of each GPU are left for the KV cache.

    Raises ConfigError if they are too few for one block. `needs` includes a draft model or a draft head.
    """
    left, scheduler = free - needs.weights - needs.step - _GPU_OVERHEAD, config.scheduler
    if left < scheduler.tokens_per_block * needs.per_token:
        draft_model = (config.speculative_config or {}).get("speculative_model")
        with_draft = f" with {draft_model} beside it" if draft_model and config.role != "context" else ""
        raise ConfigError(
            f"{config.model_path}{with_draft} does not fit: a GPU of instance {config.instance} has"
            f" {gibibytes(free)} free, and {gibibytes(needs.weights)} of weights and"
            f" {gibibytes(needs.step + _GPU_OVERHEAD)} for a step of"
            f" max_num_tokens {scheduler.max_num_tokens} and max_batch_size {scheduler.max_batch_size}"
            " leave no room for a KV cache; use more GPUs for an instance (--tensor_parallelism)",
            about=["tensor_parallelism"],
        )
    return left


def padded(n_tokens: int) -> int:
    """Return the number of copied rows that a sequence takes."""
    return -(-n_tokens // PADDED) * PADDED


def max_copied_rows(max_seq_len: int) -> int:
    """Return how many rows of keys and values attention copies out of blocks together (see `ContextPlan`)."""
    return min(_MAX_COPIED_ROWS, padded(max_seq_len))


def stages(layout: RankLayout) -> list[RankLayout]:
    return [dataclasses.replace(layout, tp_rank=0, pp_rank=stage) for stage in range(layout.pp_size)]


def load_bytes(model: ModelConfig, layout: RankLayout, dtype: str, quantization: str) -> int:
    """Return the peak bytes while a rank loads: a matrix exists twice while it is packed or fused.

    A matrix that is rounded or widened while it is loaded exists a few times, as float32.
    """
    sizes = {name: math.prod(shape) for name, shape in layout.shapes(model).items()}
    width = N_BYTES[dtype]
    # the embedding, as rows and packed
    tied = sizes["model.embed_tokens.weight"] if model.tie_word_embeddings and layout.is_last_stage else 0
    is_widened = quantization != "none" or model.stored in ("blocks", "mxfp4")
    under_way = 3 * 4 if is_widened else 2 * width
    weights = rank_bytes(model, layout, dtype, weight_type(quantization, on_gpu=False))
    return weights + tied * width + under_way * max(sizes.values())


def gibibytes(n_bytes: int) -> str:
    """Return bytes as text for messages."""
    return f"{n_bytes / 2**30:.1f} GiB"
