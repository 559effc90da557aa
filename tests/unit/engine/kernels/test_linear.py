"""Products with weights: 8 bits on a CPU against those multiplied out; few rows with what follows them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from mpillm.engine.kernels import linear, ops
from mpillm.engine.kernels.linear import Int8Linear, Linear, make_linear
from mpillm.engine.tensors.rounding import quantize_rows
from tests.helpers.compilers import no_compiler
from tests.helpers.oracle import Tokens
from tests.helpers.torch_cores import N_OUTPUT, answer, make_batch, make_core


def matrix(
    algorithm: str, n_out: int = 96, n_in: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 8-bit numbers, scales, and the float32 matrix that they stand for."""
    torch.manual_seed(n_out)
    numbers, scales = quantize_rows(torch.randn(n_out, n_in) * torch.rand(n_out, 1), algorithm)
    return numbers, scales, numbers.float() * scales


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [1, 64 * 20, 1 << 20, None])
def test_int8(piece: int | None, dtype: torch.dtype) -> None:
    """Products are right for few rows and many, with matrices of one piece and of several, and compiled."""
    numbers, scales, floats = matrix("int8")
    with contextlib.nullcontext() if piece is None else no_compiler():
        product = make_linear(numbers, scales, dtype)
    assert (product._products is None) or piece is None
    assert isinstance(product, Int8Linear) and (product.out_features, product.in_features) == (96, 64)
    for n in (0, 1, 2, 31, 32, 33, 200):
        x = torch.randn(n, 64).to(dtype)
        found = product(x)
        assert found.dtype == dtype and found.shape == (n, 96)
        wanted, max_error = x.float() @ floats.T, 1e-6 if dtype == torch.float32 else 5e-3
        assert not n or error(found, wanted) < max_error
        if piece is not None:
            unscaled = linear._product_of_int8(x, numbers, piece)
            assert not n or error(unscaled * scales.T, wanted) < max_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_in", [8, 40, 48, 72, 100, 129])
@pytest.mark.parametrize("first", [0, 8, 16])
def test_int8_rows_of_any_length_and_address(first: int, n_in: int, dtype: torch.dtype) -> None:
    """PyTorch's kernel reads 16 numbers at a time: it multiplied with those behind the row, or crashed."""
    numbers, scales, floats = matrix("int8", n_in=n_in)
    moved = torch.empty(numbers.numel() + first, dtype=torch.int8)[first:].view(numbers.shape).copy_(numbers)
    for n in (1, 3, 32):
        x = torch.randn(n, n_in).to(dtype)
        assert error(linear._product_of_int8(x, moved) * scales.T, x.float() @ floats.T) < 5e-3


def test_fp8_on_a_cpu_becomes_floats() -> None:
    numbers, scales, floats = matrix("fp8")
    product = make_linear(numbers, scales, torch.float32)
    assert type(product) is Linear
    x = torch.randn(5, 64)
    torch.testing.assert_close(product(x), x @ floats.T, atol=1e-5, rtol=1e-5)


class PlainFewRows:
    """As `kernels.few_rows.FewRows`, which is for GPUs."""

    max_rows = max_fused_rows = 4

    def __init__(self, weight: torch.Tensor, seen: list[int]) -> None:
        """`seen` gets the rows of each product."""
        self._weight, self._seen = weight.clone(), seen

    def __call__(
        self, x: torch.Tensor, activated: bool = False, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._seen.append(len(x))
        product = torch.nn.functional.linear(x, self._weight)
        if activated:
            return ops.gated(product)
        return product if residual is None else residual.add_(product)


def test_few_rows_take_along_what_follows(
    folder: Path, prompts: Tokens, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, seen = Linear.__init__, list[int]()

    def make_with_few(self: Linear, weight: torch.Tensor) -> None:
        few: Any = PlainFewRows(weight, seen)
        make(self, weight)
        self._few = few

    monkeypatch.setattr(Linear, "__init__", make_with_few)
    core = make_core(folder, max_batch_size=3)
    assert answer(core, make_batch(prompts)) == expected
    assert len(seen) > 3 * core.info.config.n_layers * N_OUTPUT and max(seen) <= PlainFewRows.max_rows
