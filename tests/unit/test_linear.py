"""Products with weights of 8 bits against those with the weights multiplied out; fp8 on tensor cores as it is computed there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_engine_torch import make_core
from test_quantize import logits

from mpillm.engine import linear, weights
from mpillm.engine.linear import Fp8Linear, Int8Linear, Linear, make_linear
from mpillm.engine.quantize import dequantize_rows, quantize_rows
from mpillm.engine.weights import save_preset


def matrix(algorithm: str, n_out: int = 96, n_in: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """8-bit numbers, scales, and the float32 matrix that they stand for."""
    torch.manual_seed(n_out)
    numbers, scales = quantize_rows(torch.randn(n_out, n_in) * torch.rand(n_out, 1), algorithm)
    return numbers, scales, numbers.float() * scales


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [1, 64 * 20, 1 << 20])
def test_int8(monkeypatch: pytest.MonkeyPatch, piece: int, dtype: torch.dtype) -> None:
    """For few rows and many, and with matrices of one piece and of several."""
    monkeypatch.setattr(linear, "_PIECE", piece)
    numbers, scales, floats = matrix("int8")
    product = make_linear(numbers, scales, dtype)
    assert isinstance(product, Int8Linear) and (product.out_features, product.in_features) == (96, 64)
    for n in (0, 1, 2, 31, 32, 33, 200):
        x = torch.randn(n, 64).to(dtype)
        found = product(x)
        assert found.dtype == dtype and found.shape == (n, 96)
        assert not n or error(found, x.float() @ floats.T) < (1e-6 if dtype == torch.float32 else 5e-3)


def test_fp8_on_a_cpu_becomes_floats() -> None:
    numbers, scales, floats = matrix("fp8")
    product = make_linear(numbers, scales, torch.float32)
    assert type(product) is Linear
    x = torch.randn(5, 64)
    torch.testing.assert_close(product(x), x @ floats.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_on_tensor_cores(dtype: torch.dtype) -> None:
    """The rows of x are rounded as well: exactly that product, up to the rounding of the sum to bfloat16."""
    numbers, scales, floats = matrix("fp8")
    product = Fp8Linear(numbers, scales)
    for n in (1, 16, 33):
        x = (torch.randn(n, 64) * torch.logspace(-3, 3, n)[:, None]).to(dtype)
        rounded = dequantize_rows(*quantize_rows(x, "fp8"), torch.float32)
        found = product(x)
        assert found.dtype == dtype
        assert error(found, rounded @ floats.T) < 4e-3
        assert 0.01 < error(found, x.float() @ floats.T) < 0.06


def test_a_model_with_fp8_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU computes it: close to what fp8 weights alone give."""
    save_preset("tiny-llama", tmp_path)
    prompt = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    exact, weights_alone = (logits(make_core(tmp_path, quantization=name), prompt) for name in ("none", "fp8"))
    monkeypatch.setattr(weights, "make_linear", lambda w, scales, dtype: Linear(w) if scales is None else Fp8Linear(w, scales))
    found = logits(make_core(tmp_path, quantization="fp8"), prompt)
    assert 0.01 < error(weights_alone, exact) < 0.25
    assert error(weights_alone, exact) < error(found, exact) < 0.35
