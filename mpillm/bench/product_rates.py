"""Rates of a model's products with weights on a CPU: compiled, and as they are without a compiler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mpillm.engine.model.model_config import ModelConfig

_MOST_BYTES = 1 << 29  # of weights: more than a cache holds
_ROUNDS = 5


def product_rates(
    config: ModelConfig, dtype: torch.dtype, rows: Sequence[int]
) -> list[tuple[float, float]] | None:
    """Return GFLOP/s for each number of rows, compiled and without: medians of alternating rounds.

    The products are those of as many dense layers as fit half a GiB, with random weights. None where they are
    not compiled.
    """
    import torch

    from mpillm.engine.kernels.cpu_products import cpu_products
    from mpillm.engine.model.linear import uncompiled

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
