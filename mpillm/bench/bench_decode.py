"""``bench engine --device cuda``: decode on one GPU; the step time over the memory's floor, and its parts."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from disagg.errors import ConfigError
from mpillm.config.core_config import CoreConfig
from mpillm.config.values import Values
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.dtypes import N_BYTES
from mpillm.engine.model.model_info import ModelInfo, check_model
from mpillm.fields import Field, integers, not_negative, positive

if TYPE_CHECKING:
    from torch import Tensor

    from mpillm.engine.engine import Engine
    from mpillm.engine.model_part import ModelPart
    from mpillm.engine.sequence import Sequence
    from mpillm.engine.worker import Worker

_WARM_UP = 4  # steps
_PAUSE_S = 50e-6
_REPLAYS = 5


class Options(Values):
    """Options of ``bench engine``, on CPUs and on a GPU."""

    device = Field(
        "device",
        "cuda: decode steps on one GPU, and their parts",
        default="cpu",
        choices=("cpu", "cuda"),
        group="benchmark",
    )
    model_path = Field(
        "model_path",
        "folder of a Hugging Face checkpoint; on a GPU also a preset [default there: llama3.1-8b]",
        group="benchmark",
    )
    dataset_path = Field(
        "dataset_path", "JSONL with prompts; without it, those that come with the program", group="benchmark"
    )
    num_prompts = Field(
        "num_prompts", "how many of the data set's prompts", positive, default=40, group="benchmark"
    )
    max_prompt_len = Field(
        "max_prompt_len", "skip longer prompts, tokens", positive, default=96, group="benchmark"
    )
    output_len = Field("output_len", "new tokens per prompt", positive, default=32, group="benchmark")
    dtype = Field(
        "dtype",
        "type of weights and activations [default: float32; on a GPU the checkpoint's]",
        choices=("float32", "bfloat16"),
        group="benchmark",
    )
    quantization = Field(
        "quantization",
        "type of the layers' weights; an unquantised checkpoint is quantised as it is loaded",
        default="auto",
        choices=("auto", "none", "int8", "fp8"),
        group="benchmark",
    )
    kv_cache_dtype = Field(
        "kv_cache_dtype",
        "type of the KV cache; auto: fp8 if the checkpoint has scales for it, otherwise dtype",
        default="auto",
        choices=("auto", "bfloat16", "fp8"),
        group="benchmark",
    )
    n_threads = Field("n_threads", "CPU threads", positive, default=2, group="benchmark")
    max_batch_size = Field(
        "max_batch_size", "requests of the engine at once", positive, default=64, group="benchmark"
    )
    max_num_tokens = Field(
        "max_num_tokens", "tokens of one engine step", positive, default=2048, group="benchmark"
    )
    batches = Field(
        "batches",
        "GPU: batch sizes, separated by commas",
        integers,
        default=(1, 64, 256, 1024),
        group="benchmark",
    )
    context_len = Field(
        "context_len", "GPU: tokens in the cache of each sequence", positive, default=512, group="benchmark"
    )
    bandwidth = Field(
        "bandwidth", "GPU: memory bandwidth, TB/s", not_negative, default=4.3, group="benchmark"
    )
    repeats = Field("repeats", "rounds; the median is printed", positive, default=3, group="benchmark")


def bench_decode(config: Options) -> int:
    """Print the table: a line per batch size."""
    gpus = TorchCore.gpus()
    if not gpus:
        raise ConfigError("--device cuda: there is no NVIDIA GPU")
    batches, context, n_steps = config.batches, config.context_len, config.output_len
    block = CoreConfig.tokens_per_block
    longest = context + n_steps + _WARM_UP + 2 * block
    core = CoreConfig(
        core_type="torch",
        model_path=config.model_path or "llama3.1-8b",
        dtype=config.dtype or "auto",
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        gpu_bytes=gpus[0].free,
        max_batch_size=max(batches),
        max_num_tokens=max(config.max_num_tokens, *batches),
        max_seq_len=longest,
        kv_cache_tokens=max(batches) * (longest + block),
        enable_chunked_context=True,
    )
    info = check_model(core)

    import torch

    from mpillm.engine.parallel.groups import Groups
    from mpillm.engine.worker import Worker

    started = time.perf_counter()
    dummy = info.folder is None
    worker = Worker.on_gpu(info, block, Groups(), core.max_batch_size, dummy=dummy, device="cuda:0")
    torch.cuda.synchronize()
    startup = time.perf_counter() - started
    with torch.inference_mode():
        for pool in (worker.part.cache.keys, worker.part.cache.values):
            for layer in pool:
                layer.copy_(torch.randn(layer.shape, device=layer.device))
    dtypes = info.dtype if info.quantization == "none" else f"{info.dtype} with {info.quantization} weights"
    print(f"{gpus[0].name}, {core.model_path}, {dtypes}, KV cache in {info.kv_dtype}")
    print(f"{context} tokens of context, greedy; loaded and captured in {startup:.1f} s")
    print(f"floor: bytes of weights and KV cache that a step reads / {config.bandwidth:g} TB/s")
    print(
        f"  {'batch':>6} {'step ms':>9} {'floor ms':>9} {'ratio':>6}"
        f" {'tokens/s':>9} {'attention':>10} {'products':>9}"
    )
    for batch in batches:
        steps, n_context = _decode(worker, info, core, batch, context, n_steps)
        step_s = statistics.median(steps)
        n_bytes = _weight_bytes(info, batch) + n_context * info.config.kv_bytes_per_token(info.kv_dtype)
        floor_s = n_bytes / (config.bandwidth * 1e12)
        attention_s = _attention(worker.part, batch, n_context // batch)
        products_s = _products(worker.part, batch)
        print(
            f"  {batch:>6} {step_s * 1e3:>9.3f} {floor_s * 1e3:>9.3f} {step_s / floor_s:>6.2f}"
            f" {batch / step_s:>9.0f} {attention_s * 1e3:>10.3f} {products_s * 1e3:>9.3f}",
            flush=True,
        )
    return 0


def _weight_bytes(info: ModelInfo, batch: int) -> int:
    """Return the bytes of weights that a step reads.

    Of the embedding the rows of its tokens; of a mixture the experts that random choices hit, on average.
    """
    c, width = info.config, N_BYTES[info.dtype]
    n_bytes = info.n_bytes - (0 if c.tie_word_embeddings else (c.vocab_size - batch) * c.hidden_size * width)
    if c.n_experts:
        expert_width = width if info.quantization == "none" else 1
        experts = 3 * c.n_layers * c.n_experts * c.intermediate_size * c.hidden_size * expert_width
        n_bytes -= round(experts * (1 - c.n_experts_per_token / c.n_experts) ** batch)
    return n_bytes


def _decode(
    worker: Worker, info: ModelInfo, core: CoreConfig, batch: int, context: int, n_steps: int
) -> tuple[list[float], int]:
    """Measure consecutive steps of the whole engine.

    Returns the seconds between their tokens, and the tokens in the cache half way.
    """
    from mpillm.engine.engine import Engine, EngineLimits

    engine = Engine(info, EngineLimits(batch, core.max_num_tokens, core.tokens_per_block), worker)
    sequences = [_admitted(engine, i, context, _WARM_UP + n_steps + 1) for i in range(batch)]
    arrivals: list[float] = []
    seen = 1
    while not engine.is_idle():
        if not engine.has_work():
            time.sleep(_PAUSE_S)
        engine.step()
        if len(sequences[0].output) > seen:
            seen = len(sequences[0].output)
            arrivals.append(time.perf_counter())
    times = [b - a for a, b in itertools.pairwise(arrivals)][_WARM_UP - 1 :]
    return times, batch * (context + _WARM_UP + n_steps // 2)


def _admitted(engine: Engine, i: int, context: int, n_output: int) -> Sequence:
    """Return a sequence in generation, as if handed over by a context instance."""
    from mpillm.engine.sampler import SamplingParams
    from mpillm.engine.sequence import Sequence

    sequence = Sequence(i, [1 + i] * context, n_output, 0, SamplingParams(), output=[2 + i], n_cached=context)
    blocks = engine.scheduler.reserve(context, sequence.n_cached_at_most)
    assert blocks is not None
    sequence.blocks = blocks
    engine.scheduler.admit(sequence)
    return sequence


def _attention(part: ModelPart, batch: int, n_tokens: int) -> float:
    """Return the seconds for the attention of all layers, over `n_tokens` of each sequence."""
    import torch

    from mpillm.engine.kernels import step_kernels as kernels

    keys, values, scales = part.cache.keys, part.cache.values, part.cache.scales
    n_layers, n_blocks, k, size, d = keys.shape
    per_sequence = -(-n_tokens // size)
    table = (
        (1 + torch.randperm(n_blocks - 1, device="cuda")[: batch * per_sequence])
        .view(batch, per_sequence)
        .to(torch.int32)
    )
    slots, positions = torch.arange(batch, device="cuda"), torch.full((batch,), n_tokens - 1, device="cuda")
    n_heads = part.model.config.n_heads
    qkv = torch.randn(batch, n_heads + 2 * k, d, device="cuda").to(part.dtype)
    out = qkv.new_empty(batch, n_heads * d)

    def work() -> None:
        for layer in range(n_layers):
            held = keys[layer], values[layer], None if scales is None else scales[layer]
            kernels.decode_attention(qkv, *held, table, slots, positions, out, n_heads)

    return _graph_time(work)


def _products(part: ModelPart, batch: int) -> float:
    """Return the seconds for all matrix products with weights."""
    import torch

    from mpillm.engine.kernels import fp8_kernels
    from mpillm.engine.kernels import step_kernels as kernels
    from mpillm.engine.model.transformer import Mixture

    model, dtype = part.model, part.dtype
    assert model.lm_head is not None
    inputs: dict[tuple[int, int], Tensor] = {}
    products: list[Callable[[], Tensor]] = []

    def add(linear: Any, n_rows: int, *choice: Any, may_be_rounded: bool = True) -> None:
        """Add a product. Before all but `o`, the engine rounds the input to fp8 if the product takes that."""
        shape = n_rows, linear.in_features
        if shape not in inputs:
            inputs[shape] = torch.randn(shape, device="cuda").to(dtype)
        x: Any = inputs[shape]
        if may_be_rounded and not choice and linear.rounds(n_rows):
            x = fp8_kernels.quantize_rows(x)
        product = linear if choice else linear.unscaled  # as the engine takes it
        products.append(lambda: product(x, *choice))

    with torch.inference_mode():
        for layer in model.layers:
            mlp, n_pairs, choice = layer.mlp, batch, []
            if isinstance(mlp, Mixture):
                n_chosen, n_experts = model.config.n_experts_per_token, model.config.n_experts
                choice = [
                    kernels.route(torch.randn(batch, n_experts, device="cuda"), n_chosen, range(n_experts))
                ]
                n_pairs = batch * n_chosen
                add(mlp.router, batch)
            add(layer.qkv, batch)
            add(layer.o, batch, may_be_rounded=False)
            add(mlp.gate_up, batch, *choice)
            add(mlp.down, n_pairs, *choice)
        add(model.lm_head, batch)

    def work() -> None:
        for product in products:
            product()

    return _graph_time(work)


def _graph_time(work: Callable[[], None]) -> float:
    """Return the seconds for a replay of `work` as a CUDA graph."""
    import torch

    with torch.inference_mode():
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / _REPLAYS
