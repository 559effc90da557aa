"""``benchmarks products``: a layer's products on a CPU, compiled by mpillm and as PyTorch has them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from mpillm.engine.kernels.cpu_products import cpu_products
from mpillm.engine.kernels.linear import uncompiled
from mpillm.engine.shape.dtypes import torch_dtype
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.read_config import load_model_config
from mpillm.errors import ExitCode
from mpillm.options.field import Field
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import integers, positive
from mpillm.options.values import Values


class Options(Values):
    """Options of ``benchmarks products``."""

    model_path = ModelFields.model_path.but(
        "folder of a checkpoint, or a preset", default="llama3.2-1b", group="benchmark"
    )
    dtype = ModelFields.dtype.but("type of weights and rows", default="float32", group="benchmark")
    rows = Field(
        "rows", "numbers of rows, separated by commas", integers, default=(1, 8, 40, 256), group="benchmark"
    )
    n_threads = Field("n_threads", "CPU threads", positive, default=2, group="benchmark")


DESCRIPTION = "Measure a dense layer's matrix products on a CPU, compiled by mpillm and without a compiler."
EPILOG = """example:
  python -m benchmarks products --model_path build/models/smollm2-135m --dtype bfloat16"""

_MOST_BYTES = 1 << 29  # of weights: more than a cache holds
_ROUNDS = 5


def product_rates(
    config: ModelConfig, dtype: torch.dtype, rows: Sequence[int]
) -> list[tuple[float, float]] | None:
    """Return GFLOP/s for each number of rows, compiled and without: medians of alternating rounds.

    The products are those of as many dense layers as fit half a GiB, with random weights. None where they are
    not compiled.
    """
    products = cpu_products(dtype, dtype)
    if products is None:
        return None
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.n_heads * config.head_dim
    qkv = heads + 2 * config.n_kv_heads * config.head_dim
    shapes = [(qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]
    n_numbers = sum(n_out * n_in for n_out, n_in in shapes)
    n_layers = max(1, min(config.n_layers, _MOST_BYTES // (n_numbers * dtype.itemsize)))
    rates = []
    with torch.inference_mode():
        weights = [torch.randn(shape).to(dtype) for shape in shapes * n_layers]
        packed = [(products.pack(weight), weight.shape) for weight in weights]
        others = [(uncompiled(weight), weight.shape) for weight in weights]
        for n in rows:
            inputs = {n_in: torch.randn(n, n_in).to(dtype) for _, n_in in shapes}
            times: list[tuple[float, float]] = []
            for _ in range(_ROUNDS):
                started = time.perf_counter()
                for panels, (n_out, n_in) in packed:
                    products.multiply(inputs[n_in], panels, n_out)
                between = time.perf_counter()
                for product, (_, n_in) in others:
                    product(inputs[n_in])
                times.append((between - started, time.perf_counter() - between))
            mine, without = (
                2 * n * n_numbers * n_layers / statistics.median(column) / 1e9
                for column in zip(*times, strict=True)
            )
            rates.append((mine, without))
    return rates


def main(config: Options) -> int:
    """Print a line for each number of rows."""
    torch.set_num_threads(config.n_threads)
    rates = product_rates(load_model_config(config.model_path), torch_dtype(config.dtype), config.rows)
    if rates is None:
        print("there is no C compiler: nothing is compiled")
        return ExitCode.DONE
    print(f"  {'rows':>6} {'GFLOP/s':>9} {'uncompiled':>11}")
    for n, (mine, without) in zip(config.rows, rates, strict=True):
        print(f"  {n:>6,} {mine:>9.0f} {without:>11.0f}")
    return ExitCode.DONE
