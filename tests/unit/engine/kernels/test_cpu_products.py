"""Compiled products with packed weights compute what PyTorch's do, and are used where they are faster."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator

import pytest
import torch

from mpillm.engine.kernels import linear
from mpillm.engine.kernels.cpu_products import CpuProducts, cpu_products
from mpillm.engine.kernels.linear import GroupedLinear, Linear, Mxfp4Linear
from mpillm.engine.kernels.ops import choice_of
from mpillm.engine.shape.mxfp4 import widened
from tests.helpers.compilers import no_compiler

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
TYPES = [torch.float32, torch.bfloat16]


def products_of(dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> CpuProducts:
    products = cpu_products(dtype, weight_dtype or dtype)
    assert products is not None
    return products


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [1, 64, 600, 601, 1900])  # pieces of up to 600
@pytest.mark.parametrize("outputs", [1, 31, 64, 100])  # panels of 16 or 32
def test_equal_pytorchs(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    torch.manual_seed(1)
    products, weight = products_of(dtype), torch.randn(outputs, inputs).to(dtype)
    packed = products.pack(weight)
    for n in (0, 1, 2, 5, 6, 7, 12, 13, 40, 96, 97, 300):
        x = torch.randn(n, inputs).to(dtype)
        exact = x.double() @ weight.double().T
        found = products.multiply(x, packed, outputs)
        assert found.dtype == dtype
        rounding = 4e-3 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=rounding * inputs**0.5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(dtype: torch.dtype, threads: int) -> None:
    """They share outputs or, on CPUs that multiply matrices, many rows; a thread may have none of either."""
    torch.manual_seed(1)
    products, weight = products_of(dtype), torch.randn(70, 610).to(dtype)
    packed, before = products.pack(weight), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for n in (1, 17, 257, 515, 1030):
            x = torch.randn(n, 610).to(dtype)
            exact = x.double() @ weight.double().T
            found = products.multiply(x, packed, 70)
            rounding = 4e-3 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=rounding * 25)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("outputs", [1, 31, 64, 100])
def test_int8_weights_are_scaled(dtype: torch.dtype, outputs: int) -> None:
    torch.manual_seed(1)
    products = products_of(dtype, torch.int8)
    weight, scales = torch.randint(-127, 128, (outputs, 700), dtype=torch.int8), torch.rand(outputs, 1)
    packed, factors = products.pack(weight), products.pack_scales(scales)
    for n in (1, 7, 40, 97):
        x = torch.randn(n, 700).to(dtype)
        exact = (x.double() @ weight.double().T) * scales.double().T
        found = products.multiply(x, packed, outputs, factors)
        rounding = 4e-3 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=rounding * 1000)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [32, 96, 1280])
@pytest.mark.parametrize("outputs", [1, 31, 64, 100])
def test_weights_in_mxfp4(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """All numbers, with an exponent for each 32 inputs of an output."""
    random = torch.Generator().manual_seed(1)
    products = products_of(dtype, torch.uint8)
    blocks = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8, generator=random)
    exponents = torch.randint(110, 130, (outputs, inputs // 32), dtype=torch.uint8, generator=random)
    packed, factors = products.pack(blocks), products.pack_exponents(exponents)
    assert packed.numel() <= inputs // 2 * (outputs + 31)
    weight = widened(blocks, exponents).double()
    for n in (0, 1, 3, 12, 13, 97):
        x = torch.randn(n, inputs, generator=random).to(dtype)
        found = products.multiply(x, packed, outputs, factors)
        rounding = 4e-3 if dtype == torch.bfloat16 else 1e-5
        exact = x.double() @ weight.T
        torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=rounding * 8 * inputs**0.5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["floats", "int8", "mxfp4"])
@pytest.mark.parametrize("per_row", [1, 3])
def test_experts(dtype: torch.dtype, kind: str, per_row: int) -> None:
    """In one call: some are nobody's, some have more rows than are copied at once, some fit a tile."""
    random = torch.Generator().manual_seed(1)
    products = products_of(dtype, {"floats": dtype, "int8": torch.int8, "mxfp4": torch.uint8}[kind])
    inputs, outputs = 640, 50
    for counts in ([2, 0, 5, 90], [0, 0, 0, 3], [0, 250, 1, 97], [95, 1, 1, 95], [0, 0, 0, 0]):
        experts = len(counts)
        n_pairs = sum(counts) + 1 + (-sum(counts) - 1) % 3  # the last ones are other ranks'
        x = torch.randn(n_pairs // per_row, inputs, generator=random).to(dtype)
        weights: list[torch.Tensor] = []
        packed: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for _ in range(experts):
            if kind == "mxfp4":
                blocks = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8, generator=random)
                exponents = torch.randint(
                    120, 128, (outputs, inputs // 32), dtype=torch.uint8, generator=random
                )
                packed.append((products.pack(blocks), products.pack_exponents(exponents)))
                weights.append(widened(blocks, exponents).double())
            elif kind == "int8":
                weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=random)
                scales = torch.rand(outputs, 1, generator=random)
                packed.append((products.pack(weight), products.pack_scales(scales)))
                weights.append(weight.double() * scales.double())
            else:
                weight = torch.randn(outputs, inputs, generator=random).to(dtype)
                packed.append((products.pack(weight), None))
                weights.append(weight.double())
        order = torch.randperm(n_pairs, generator=random)
        ends = torch.tensor(counts).cumsum(0)
        exact = torch.zeros(n_pairs, outputs, dtype=torch.float64)
        for expert, pairs in enumerate(torch.split(order[: ends[-1]], counts)):
            exact[pairs] = x[pairs // per_row].double() @ weights[expert].T
        found = products.experts(packed, outputs)(x, order, ends)
        assert found.dtype == dtype
        scale = max(float(exact.abs().max()), 1.0)
        rounding = 4e-3 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=rounding * scale)
        assert not found[order[ends[-1] :]].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_experts_are_multiplied_as_one_by_one(dtype: torch.dtype) -> None:
    """With their biases, to the bit."""
    torch.manual_seed(1)
    linears = [Linear(torch.randn(48, 64).to(dtype)) for _ in range(5)]
    grouped = GroupedLinear(linears, [torch.randn(48).to(dtype) for _ in linears])
    assert grouped.biases is not None
    chosen = torch.rand(37, 6).topk(2).indices
    choice = choice_of(torch.rand(37, 2).to(dtype), chosen, range(1, 6))
    x = torch.randn(37, 64).to(dtype)
    found = grouped(x, choice)
    for row in range(37):
        for place, expert in enumerate(chosen[row].tolist()):
            alone = (
                linears[expert - 1](x[row][None])[0] + grouped.biases[expert - 1] if expert else 0 * found[0]
            )
            assert found[2 * row + place].equal(alone)


@pytest.mark.parametrize("dtype", TYPES)
def test_mxfp4_without_a_compiler(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    n = linear._PIECE // 96 + 70  # two pieces
    blocks = torch.randint(256, (n, 48), dtype=torch.uint8, generator=random)
    exponents = torch.randint(120, 130, (n, 3), dtype=torch.uint8, generator=random)
    with no_compiler():
        product = Mxfp4Linear(blocks, exponents, dtype)
    assert product._products is None
    x = torch.randn(5, 96, generator=random).to(dtype)
    wanted = torch.nn.functional.linear(x, widened(blocks, exponents).to(dtype))
    torch.testing.assert_close(product(x), wanted)


@pytest.mark.parametrize("dtype", TYPES)
def test_rounds_to_the_nearest_and_keeps_what_is_not_a_number(dtype: torch.dtype) -> None:
    products, weight = products_of(dtype), torch.eye(16).to(dtype)
    x = torch.tensor([[1, -0.0, 3e38, torch.inf, -torch.inf, 0.1]]).to(dtype)
    column = torch.zeros(6, 16, dtype=dtype)
    column[torch.arange(6), torch.arange(6)] = x[0]
    found = products.multiply(column[:3], products.pack(weight), 16)
    assert found.equal(column[:3])
    sums = products.multiply(torch.ones(1, 2, dtype=dtype), products.pack(x.reshape(3, 2)), 3)
    assert sums[0].isnan().tolist() == [False, False, False] and sums[0, 1].isinf()
    assert products.multiply(x[:, 3:5], products.pack(torch.ones(1, 2, dtype=dtype)), 1).isnan()
    # 1 + 2^-8 lies between two bfloat16: the even one.
    tie = products.multiply(
        torch.ones(1, 2, dtype=dtype), products.pack(torch.tensor([[1, 2**-8]]).to(dtype)), 1
    )
    assert tie.item() == (1 if dtype == torch.bfloat16 else 1 + 2**-8)


def test_packed_weights_are_copies() -> None:
    weight = torch.randn(16, 1)
    packed = products_of(torch.float32).pack(weight)
    weight.zero_()
    assert packed.abs().sum() > 0


@pytest.fixture
def _measured_anew() -> Iterator[None]:
    linear._compiled.cache_clear()
    yield
    linear._compiled.cache_clear()


@pytest.mark.usefixtures("_measured_anew")
@pytest.mark.parametrize(("mine", "is_used"), [(1.0, True), (3.0, False)])
def test_the_faster_ones_are_used(monkeypatch: pytest.MonkeyPatch, mine: float, is_used: bool) -> None:
    monkeypatch.setattr(CpuProducts, "compare_times", lambda self, other: (mine, 2.0))
    weight, x = torch.randn(20, 30), torch.randn(4, 30)
    assert isinstance(Linear(weight)._products, CpuProducts) == is_used
    torch.testing.assert_close(Linear(weight)(x), x @ weight.T)


def test_times_are_those_of_the_same_product() -> None:
    def other(weight: torch.Tensor) -> functools.partial[torch.Tensor]:
        return functools.partial(torch.nn.functional.linear, weight=weight)

    mine, others = products_of(torch.float32).compare_times(other)
    assert 0 < mine < 1 and 0 < others < 1
