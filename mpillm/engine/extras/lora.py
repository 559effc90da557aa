"""LoRA: low-rank changes of a model's products. Requests of one step may have different adapters, or none.

An adapter arrives as tensors in TensorRT-LLM's format, which TensorRT-LLM's `hf_lora_convert.py` and our
`hf-lora-convert` write. A row of `lora_weights` is A [rank, in] and B [out, rank] back to back, padded with
zeros. A row of `lora_config` is the module's id, the layer, and the rank. B includes the scale.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.shape.composition import GatedFeedForward
from mpillm.engine.shape.layout import RankLayout, share
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.weights.rank_weights import rotary_order

MODULES = {
    "attn_qkv": 0,
    "attn_q": 1,
    "attn_k": 2,
    "attn_v": 3,
    "attn_dense": 4,
    "mlp_h_to_4h": 5,
    "mlp_4h_to_h": 6,
    "mlp_gate": 7,
}
"""TensorRT-LLM's module ids. In a Llama model, `mlp_h_to_4h` is `gate_proj`, and `mlp_gate` is `up_proj`."""

_NAMES = {number: name for name, number in MODULES.items()}
_numbers = itertools.count()


class AdapterTensors(NamedTuple):
    """Tensors of a request, from which each rank of an instance makes its part of an adapter."""

    number: int  # unique on the root rank
    weights: NDArray[Any]  # [modules, width]
    config: NDArray[np.int32]  # [modules, 3]


class Adapter:
    """Terms that are added to the products of each layer: ``(x @ A.T) @ B.T``, A [r, in], B [out, r].

    With tensor parallelism, an adapter is split like the weights. For a product whose outputs are split, this
    rank has rows of B. For a product that the ranks add up, it has columns of A.
    """

    def __init__(
        self,
        weights: NDArray[Any],
        config: NDArray[np.int32],
        model: ModelConfig,
        dtype: torch.dtype,
        layout: RankLayout = RankLayout(),  # noqa: B008 - it is frozen
    ) -> None:
        """Read `weights` [modules, width] and `config` [modules, 3]. Raises ValueError if they do not fit."""
        self.salt = secrets.token_bytes(16)  # sequences with different adapters share no cached blocks
        self.number = next(_numbers)
        self.tensors = AdapterTensors(self.number, weights, config) if layout.tp_size > 1 else None
        self.n_bytes = weights.nbytes if layout.tp_size > 1 else 0
        parts: dict[tuple[int, str], list[tuple[Tensor, Tensor, slice]]] = {}
        if weights.ndim != 2 or config.shape != (len(weights), 3):
            raise ValueError(
                f"lora_weights {list(weights.shape)} and lora_config {list(config.shape)}:"
                " expected [modules, values] and [modules, 3]"
            )
        for row, (module, layer, rank) in zip(weights, config.tolist(), strict=True):
            product, n_in, rows = _place(module, model)
            n_out, name = rows.stop - rows.start, _NAMES[module]
            if not 0 <= layer < model.n_layers or not 0 < rank <= min(n_in, n_out):
                raise ValueError(
                    f"lora_config: {name} of layer {layer} with rank {rank} is not possible here"
                )
            if len(row) < rank * (n_in + n_out) or np.any(row[rank * (n_in + n_out) :]):
                raise ValueError(
                    f"lora_weights: {name} of layer {layer} has not {rank} x ({n_in} + {n_out}) values"
                )
            numbers = torch.from_numpy(row.astype(np.float32))
            a = numbers[: rank * n_in].view(rank, n_in)
            b = _reordered(name, numbers[rank * n_in : rank * (n_in + n_out)].view(n_out, rank), model)
            parts.setdefault((layer, product), []).append((a, b, rows))
        self._products = {
            key: self._joined(some, model, key[1], dtype, layout) for key, some in parts.items()
        }

    def _joined(
        self,
        parts: list[tuple[Tensor, Tensor, slice]],
        model: ModelConfig,
        product: str,
        dtype: torch.dtype,
        layout: RankLayout,
    ) -> tuple[Tensor, Tensor]:
        """Return A and B of one product from its parts: B has zeros where a part adds nothing."""
        a = torch.cat([part for part, _, _ in parts]).to(dtype)
        b = torch.zeros(_N_OUT[product](model), len(a), dtype=dtype)
        column = 0
        for of_rank, values, rows in parts:
            b[rows, column : column + len(of_rank)] = values.to(dtype)
            column += len(of_rank)
        a, b = _part(a, b, product, model, layout)
        self.n_bytes += a.nbytes + b.nbytes
        return a, b

    def product(self, layer: int, name: str) -> tuple[Tensor, Tensor] | None:
        """Return A and B; None: the adapter adds nothing to this product."""
        return self._products.get((layer, name))


def _part(
    a: Tensor, b: Tensor, product: str, model: ModelConfig, layout: RankLayout
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of A and B (see `RankLayout.part`)."""
    if layout.tp_size == 1:
        return a, b
    (q, kv), d, heads = _heads(model), model.head_dim, layout.kv_heads(model)
    own_q = share(q, layout.tp_rank, layout.tp_size)
    own_i = share(model.intermediate_size, layout.tp_rank, layout.tp_size)
    own_kv = slice(heads.start * d, heads.stop * d)
    match product:
        case "qkv":
            return a, torch.cat([b[:q][own_q], b[q : q + kv][own_kv], b[q + kv :][own_kv]])
        case "gate_up":
            n = model.intermediate_size
            return a, torch.cat([b[:n][own_i], b[n:][own_i]])
        case _:
            return a[:, own_q if product == "o" else own_i].contiguous(), b


def _heads(model: ModelConfig) -> tuple[int, int]:
    return model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim


_N_OUT: dict[str, Callable[[ModelConfig], int]] = {
    "qkv": lambda model: _heads(model)[0] + 2 * _heads(model)[1],
    "o": lambda model: model.hidden_size,
    "gate_up": lambda model: 2 * model.intermediate_size,
    "down": lambda model: model.hidden_size,
}


def _place(module: int, model: ModelConfig) -> tuple[str, int, slice]:
    """Return the product that contains a module, its input size, and the module's rows. Raises ValueError."""
    name = _NAMES.get(module, str(module))
    q, kv = _heads(model)
    h, i = model.hidden_size, model.intermediate_size
    places = {
        "attn_qkv": ("qkv", h, slice(0, q + 2 * kv)),
        "attn_q": ("qkv", h, slice(0, q)),
        "attn_k": ("qkv", h, slice(q, q + kv)),
        "attn_v": ("qkv", h, slice(q + kv, q + 2 * kv)),
        "attn_dense": ("o", q, slice(0, h)),
        "mlp_h_to_4h": ("gate_up", h, slice(0, i)),
        "mlp_gate": ("gate_up", h, slice(i, 2 * i)),
        "mlp_4h_to_h": ("down", i, slice(0, h)),
    }
    is_dense = isinstance(model.layer(0).feed_forward, GatedFeedForward)
    if model.latent is not None or name not in places or (not is_dense and name.startswith("mlp")):
        raise ValueError(f"lora_config: this model has no module {name}")
    return places[name]


def _reordered(name: str, b: Tensor, model: ModelConfig) -> Tensor:
    """Return B with the rows of q and k in the model's order."""
    q, kv = _heads(model)
    if name in ("attn_q", "attn_k"):
        return rotary_order(b, model.head_dim)
    if name == "attn_qkv":
        return torch.cat([rotary_order(b[: q + kv], model.head_dim), b[q + kv :]])
    return b


class Adapters:
    """Cache of adapters by task id. It drops the least recently used adapter first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._of: dict[int, Adapter] = {}  # the longest unused first

    def get(self, task_id: int, make: Callable[[], Adapter] | None) -> Adapter:
        """Return the adapter of `task_id`. If it is not cached, call `make`. Task 0 is never cached.

        Raises:
            LookupError: The adapter is not cached, and `make` is None.
            ValueError: The adapter exceeds the size of the cache.
        """
        adapter = self._of.pop(task_id, None)
        if adapter is None:
            if make is None:
                raise LookupError(
                    f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
                )
            adapter = make()
            if adapter.n_bytes > self._max_bytes:
                raise ValueError(
                    f"lora_weights: {adapter.n_bytes} bytes exceed"
                    f" lora_cache_host_memory_bytes {self._max_bytes}"
                )
        if task_id == 0:
            return adapter
        self._of[task_id] = adapter
        while sum(one.n_bytes for one in self._of.values()) > self._max_bytes:
            del self._of[next(iter(self._of))]
        return adapter
