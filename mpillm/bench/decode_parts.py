"""The operations of a decode step, alone: what each takes, and the roofline of the GPU that runs them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpillm.bench.roofline import Part
from mpillm.engine.dtypes import N_BYTES
from mpillm.engine.graphs import capture
from mpillm.telemetry.gpu_meter import GPU_COLUMNS, GpuMeter

if TYPE_CHECKING:
    from torch import Tensor

    from mpillm.engine.model_part import ModelPart

_REPLAYS = 5
_READ = 1 << 30  # bytes, many times what the caches hold
_MANY_ROWS = 8192
_LOGITS_ROWS = 2048  # each as long as the vocabulary
_ON_END_S = 3.0


class Rate(NamedTuple):
    """How much of a load a GPU does in a second, with nothing beside it."""

    at_first: float  # in milliseconds
    on_end: float  # in seconds; the GPU may have reached its limit of power
    watts: float  # meanwhile; NaN where the driver does not say, as the clock
    sm_mhz: float


def measure_rates(part: ModelPart, kernels: Any) -> tuple[Rate, Rate, Rate]:
    """Return those of bytes read, and of FLOP of many rows with a layer's weights and with the head's.

    A copy would not do: in a graph it is left to an engine that copies at 2.8 TB/s where kernels reach 4.
    """
    read = torch.empty(_READ // 8, dtype=torch.int64, device=part.device)
    layers, head = (
        next(one for one in _products(part, n_rows, kernels) if one.name == name)
        for name, n_rows in (("qkv", _MANY_ROWS), ("head", _LOGITS_ROWS))
    )
    return (
        _rate(read.sum, read.nbytes),
        _rate(layers.work, layers.n_flops),
        _rate(head.work, head.n_flops),
    )


def _rate(work: Callable[[], object], amount: float) -> Rate:
    at_first_s = seconds_of(work)
    graph, n = capture(work)[0], max(1, round(0.01 / at_first_s))
    try:
        meter = GpuMeter(0)
    except OSError:
        meter = None
    n_done, began = 0, time.perf_counter()
    readings: list[tuple[float, dict[str, float]]] = []
    while (now := time.perf_counter() - began) < _ON_END_S:
        if meter is not None and now > len(readings) * _ON_END_S / 4:
            readings.append((now, dict(zip(GPU_COLUMNS, meter.read(), strict=True))))
        for _ in range(n):
            graph.replay()
        torch.cuda.synchronize()
        n_done += n
    watts = sm_mhz = math.nan
    if len(readings) > 2:
        (first_s, first), *_, (last_s, last) = readings
        watts, sm_mhz = (last["energy_j"] - first["energy_j"]) / (last_s - first_s), last["sm_mhz"]
    return Rate(amount / at_first_s, n_done * amount / now, watts, sm_mhz)


def decode_parts(part: ModelPart, batch: int, n_tokens: int, kernels: Any) -> list[Part]:
    """Return what a step of `batch` sequences with `n_tokens` in the cache each is made of.

    Norms, rotary embedding, cache writes and the choice of a token are not among them.
    """
    return [_attention(part, batch, n_tokens, kernels), *_products(part, batch, kernels)]


def _attention(part: ModelPart, batch: int, n_tokens: int, kernels: Any) -> Part:
    keys, values, scales = part.cache.keys, part.cache.values, part.cache.scales
    n_layers, n_blocks, n_kv_heads, size, head_dim = keys.shape
    per_sequence, n_heads = -(-n_tokens // size), part.model.config.n_heads
    chosen = 1 + torch.randperm(n_blocks - 1, device=part.device)[: batch * per_sequence]
    table = chosen.view(batch, per_sequence).to(torch.int32)
    slots = torch.arange(batch, device=part.device)
    positions = torch.full((batch,), n_tokens - 1, device=part.device)
    qkv = torch.randn(batch, n_heads + 2 * n_kv_heads, head_dim, device=part.device).to(part.dtype)
    out = qkv.new_empty(batch, n_heads * head_dim)

    def work() -> None:
        for layer in range(n_layers):
            held = keys[layer], values[layer], None if scales is None else scales[layer]
            kernels.decode_attention(qkv, *held, table, slots, positions, out, n_heads)

    held_bytes = batch * n_tokens * 2 * n_kv_heads * head_dim * keys.element_size()
    return Part(
        "attention",
        work,
        n_layers * (held_bytes + (qkv.numel() + out.numel()) * qkv.element_size()),
        n_layers * 4 * batch * n_tokens * n_heads * head_dim,
        True,
    )


def _products(part: ModelPart, n_rows: int, kernels: Any) -> list[Part]:
    """Return the products with weights: those of the layers, by name, and the head."""
    from mpillm.engine.model.transformer import Mixture

    model = part.model
    assert model.lm_head is not None
    width = N_BYTES[part.info.dtype] if part.info.quantization == "none" else 1
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Mixture)]
    choice, n_pairs, n_hit = [], n_rows, 1.0
    if mixtures:
        n_experts, n_chosen = part.info.config.n_experts, part.info.config.n_experts_per_token
        scores = torch.randn(n_rows, n_experts, device=part.device)
        choice, n_pairs = [kernels.route(scores, n_chosen, range(n_experts))], n_rows * n_chosen
        n_hit = n_experts * (1 - (1 - n_chosen / n_experts) ** n_rows)
    inputs: dict[tuple[int, int], Tensor] = {}

    def products(
        name: str, linears: list[Any], rows: int, chosen: list[Any], may_be_rounded: bool = True
    ) -> Part:
        """Before all but `o`, the engine rounds the input to fp8 if the product takes that."""
        of = linears[0]
        shape = rows, of.in_features
        if shape not in inputs:
            inputs[shape] = torch.randn(shape, device=part.device).to(part.dtype)
        x: Any = inputs[shape]
        if may_be_rounded and not chosen and of.rounds(rows):
            from mpillm.engine.kernels import fp8_kernels

            x = fp8_kernels.quantize_rows(x)

        def work() -> None:
            for linear in linears:
                (linear if chosen else linear.unscaled)(x, *chosen)  # as the engine takes it

        pairs = n_pairs if chosen else rows
        weights = of.in_features * of.out_features * (n_hit if chosen else 1)
        of_weights = N_BYTES[part.info.dtype] if name in ("head", "router") else width
        moved = (rows * of.in_features + pairs * of.out_features) * N_BYTES[part.info.dtype]
        n = len(linears)
        return Part(
            name,
            work,
            n * (weights * of_weights + moved),
            n * 2 * pairs * of.in_features * of.out_features,
            name in ("head", "router"),
        )

    mlps = [layer.mlp for layer in model.layers]
    return [
        products("qkv", [layer.qkv for layer in model.layers], n_rows, []),
        products("o", [layer.o for layer in model.layers], n_rows, [], may_be_rounded=False),
        *([products("router", [mlp.router for mlp in mixtures], n_rows, [])] if mixtures else []),
        products("gate_up", [mlp.gate_up for mlp in mlps], n_rows, choice),
        products("down", [mlp.down for mlp in mlps], n_pairs, choice),
        products("head", [model.lm_head], n_rows, []),
    ]


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds for a replay of `work` as a CUDA graph."""
    with torch.inference_mode():
        work()
        graph, _ = capture(work)
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / _REPLAYS
