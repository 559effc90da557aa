"""The operations of a decode step, alone: what each takes, and the roofline of the GPU that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.power_readings import PowerReader
from mpillm.engine.shape.dtypes import N_BYTES
from mpillm.engine.tensors.graphs import capture
from mpillm.experiments.bench.roofline import Energy, Roofline, Work

if TYPE_CHECKING:
    from torch import Tensor

    from mpillm.engine.model.model_part import ModelPart

_REPLAYS = 5


class Loads(NamedTuple):
    """How large the loads are, and how long each is measured."""

    n_bytes: int = 1 << 30  # many times what the caches hold
    n_rows: int = 8192
    n_logits_rows: int = 2048  # each as long as the vocabulary
    settle_s: float = 1.0  # by then the clock has settled
    on_end_s: float = 2.0
    idle_s: float = 1.0  # clocks stay up longer than twice that


@dataclass(frozen=True)
class LayerOp:
    """An operation in all layers."""

    name: str
    run: Callable[[], None]
    work: Work

    def limit(self, roofline: Roofline) -> str:
        """Return what limits the operation: "memory" or "arithmetic"."""
        memory_s = self.work.n_bytes / roofline.bandwidth
        return "memory" if memory_s >= roofline.seconds(self.work) else "arithmetic"


class Rate(NamedTuple):
    """How much of a load a GPU does in a second, with nothing beside it."""

    at_first: float  # in milliseconds
    on_end: float  # in seconds; the GPU may have reached its limit of power
    watts: float  # meanwhile; NaN where the driver does not say, as the clock
    sm_mhz: float


class Rates(NamedTuple):
    """Of bytes read, and of FLOP of many rows with a layer's weights and with the head's."""

    reading: Rate
    layers: Rate
    head: Rate
    in_turns: Rate  # FLOP with layers' weights, reading for as long between them
    bytes_per_flop: float  # read there
    idle_watts: float  # with the clocks up

    def energy(self) -> Energy:
        """Return what the GPU draws; NaN where the driver does not say."""
        each = (
            (rate.watts - self.idle_watts) / rate.on_end for rate in (self.reading, self.layers, self.head)
        )
        return Energy(self.idle_watts, *each)

    def in_turns_by_energy(self) -> float:
        """Return the watts of reading and products in turns, if each draws there what it draws alone."""
        flops = self.in_turns.on_end
        return self.energy().joules(1.0, [Work(flops * self.bytes_per_flop, flops, in_floats=False)])


class CudaGraphs:
    """Work that is captured once and replayed."""

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Return a function that replays `work`."""
        graph, _ = capture(work)
        return graph.replay

    def synchronize(self) -> None:
        """Wait for all replays."""
        torch.cuda.synchronize()

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Return the seconds for a replay of `work`, its kernels one by one."""
        from mpillm.engine.kernels.early_starts import one_by_one

        with torch.inference_mode(), one_by_one():
            work()
            replay = self.capture(work)
            replay()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(_REPLAYS):
                replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / _REPLAYS


def measure_rates(
    part: ModelPart, kernels: Any, graphs: CudaGraphs, power: PowerReader, loads: Loads
) -> Rates:
    """Measure for some 15 s. The bytes read are those of the KV cache: what data cost depends on their bits.

    A copy would not do: in a graph it is left to an engine that copies at 2.8 TB/s where kernels reach 4.
    """
    held = part.cache.keys.view(torch.uint8).flatten()[: loads.n_bytes]
    read = held.repeat(-(-loads.n_bytes // len(held)))[: loads.n_bytes].view(torch.int64)
    layers, head = (
        next(one for one in _products(part, n_rows, kernels) if one.name == name)
        for name, n_rows in (("qkv", loads.n_rows), ("head", loads.n_logits_rows))
    )

    def rate(work: Callable[[], object], amount: float) -> Rate:
        at_first_s = graphs.seconds_of(work)
        replay, n = graphs.capture(work), max(1, round(0.01 / at_first_s))

        def replay_for(seconds: float) -> int:
            n_done, began = 0, time.perf_counter()
            while time.perf_counter() - began < seconds:
                for _ in range(n):
                    replay()
                graphs.synchronize()
                n_done += n
            return n_done

        replay_for(loads.settle_s)
        first = power.read()
        n_done = replay_for(loads.on_end_s)
        last = power.read()
        on_end = n_done * amount / (last.at - first.at)
        return Rate(amount / at_first_s, on_end, last.watts_since(first), last.sm_mhz)

    reading = rate(read.sum, read.nbytes)
    products = rate(layers.run, layers.work.n_flops)
    products_of_head = rate(head.run, head.work.n_flops)
    n_reads = max(1, round(layers.work.n_flops / products.on_end * reading.on_end / read.nbytes))

    def turns() -> None:
        for _ in range(n_reads):
            read.sum()
        layers.run()

    in_turns = rate(turns, layers.work.n_flops)
    time.sleep(loads.idle_s)
    first = power.read()
    time.sleep(loads.idle_s)
    idle_watts = power.read().watts_since(first)
    bytes_per_flop = n_reads * read.nbytes / layers.work.n_flops
    return Rates(reading, products, products_of_head, in_turns, bytes_per_flop, idle_watts)


def decode_parts(part: ModelPart, batch: int, n_tokens: int, kernels: Any) -> list[LayerOp]:
    """Return what a step of `batch` sequences with `n_tokens` in the cache each is made of.

    Norms, rotary embedding, cache writes and the choice of a token are not among them.
    """
    return [_attention(part, batch, n_tokens, kernels), *_products(part, batch, kernels)]


def _attention(part: ModelPart, batch: int, n_tokens: int, kernels: Any) -> LayerOp:
    keys, values, scales = part.cache.keys, part.cache.values, part.cache.scales
    n_layers, n_blocks, n_kv_heads, size, head_dim = keys.shape
    per_sequence, n_heads = -(-n_tokens // size), part.model.config.n_heads
    chosen = 1 + torch.randperm(n_blocks - 1, device=part.device)[: batch * per_sequence]
    table = chosen.view(batch, per_sequence).to(torch.int32)
    slots = torch.arange(batch, device=part.device)
    positions = torch.full((batch,), n_tokens - 1, device=part.device)
    qkv = torch.randn(batch, n_heads + 2 * n_kv_heads, head_dim, device=part.device).to(part.dtype)
    out = qkv.new_empty(batch, n_heads * head_dim)

    def run() -> None:
        for layer in range(n_layers):
            held = keys[layer], values[layer], None if scales is None else scales[layer]
            kernels.decode_attention(qkv, *held, table, slots, positions, out, n_heads)

    held_bytes = batch * n_tokens * 2 * n_kv_heads * head_dim * keys.element_size()
    moved = (qkv.numel() + out.numel()) * qkv.element_size()
    n_flops = 4 * batch * n_tokens * n_heads * head_dim
    return LayerOp(
        "attention", run, Work(n_layers * (held_bytes + moved), n_layers * n_flops, in_floats=True)
    )


def _products(part: ModelPart, n_rows: int, kernels: Any) -> list[LayerOp]:
    """Return the products with weights: those of the layers, by name, and the head."""
    from mpillm.engine.model.feed_forward import ExpertMixture, PlainMlp

    model = part.model
    assert model.lm_head is not None
    quantization = part.info.quantization
    width = N_BYTES[part.info.dtype]  # of floats
    of_experts, of_others = {"none": (width, width), "mxfp4": (17 / 32, width), "int4": (0.53, 0.53)}.get(
        quantization, (1, 1)
    )
    mixtures = [mlp for layer in model.layers if isinstance(mlp := layer.feed_forward, ExpertMixture)]
    choice, n_pairs, n_hit = [], n_rows, 1.0
    if mixtures:
        n_experts, n_chosen = part.info.config.n_experts, part.info.config.n_experts_per_token
        scores = torch.randn(n_rows, n_experts, device=part.device)
        choice, n_pairs = [kernels.route(scores, n_chosen, range(n_experts))], n_rows * n_chosen
        n_hit = n_experts * (1 - (1 - n_chosen / n_experts) ** n_rows)
    inputs: dict[tuple[int, int], Tensor] = {}

    def products(
        name: str, linears: list[Any], rows: int, chosen: list[Any], may_be_rounded: bool = True
    ) -> LayerOp:
        """Before all but `o`, the engine rounds the input to fp8 if the product takes that."""
        of = linears[0]
        shape = rows, of.in_features
        if shape not in inputs:
            inputs[shape] = torch.randn(shape, device=part.device).to(part.dtype)
        x: Any = inputs[shape]
        if may_be_rounded and not chosen and of.rounds(rows):
            from mpillm.engine.kernels import fp8_kernels

            x = fp8_kernels.quantize_rows(x)

        def run() -> None:
            for linear in linears:
                (linear if chosen else linear.unscaled)(x, *chosen)  # as the engine takes it

        pairs = n_pairs if chosen else rows
        weights = of.in_features * of.out_features * (n_hit if chosen else 1)
        in_floats = name in ("head", "router")
        of_weights = width if in_floats else of_experts if chosen else of_others
        moved = (rows * of.in_features + pairs * of.out_features) * width
        n_flops = 2 * pairs * of.in_features * of.out_features
        n = len(linears)
        return LayerOp(name, run, Work(n * (weights * of_weights + moved), n * n_flops, in_floats))

    attentions: list[Any] = [layer.attention for layer in model.layers]
    mlps: list[Any] = [layer.feed_forward for layer in model.layers]
    outputs = [each.output.product for each in attentions]
    ups = [mlp.up if isinstance(mlp, PlainMlp) else mlp.gate_up for mlp in mlps]
    downs = [mlp.down if isinstance(mlp, ExpertMixture) else mlp.down.product for mlp in mlps]
    return [
        products("qkv", [each.product for each in attentions], n_rows, []),
        products("o", outputs, n_rows, [], may_be_rounded=False),
        *([products("router", [mlp.router for mlp in mixtures], n_rows, [])] if mixtures else []),
        products("gate_up", ups, n_rows, choice),
        products("down", downs, n_pairs, choice),
        products("head", [model.lm_head], n_rows, []),
    ]
