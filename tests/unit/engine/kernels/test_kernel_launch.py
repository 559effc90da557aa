"""`Kernel` takes a compiled form that it knows only where Triton would take the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpillm.engine.kernels.launch import Kernel, cdiv, next_power_of_2

GRID = (3, 2)


class Compiled:
    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.launches.append((grid, *args))


class Function:
    """As `triton.jit` makes of ``def f(x, n, width, ROWS, BLOCK)``; it compiles at each call."""

    arg_names = ("x", "n", "width", "ROWS", "BLOCK")
    do_not_specialize = ("n",)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.compiled = Compiled()
        self.is_interpreted = False

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled | None]:
        def call(*args: Any, **constants: Any) -> Compiled | None:
            self.calls.append((grid, *args, constants))
            return None if self.is_interpreted else self.compiled

        return call


X = torch.zeros(8)


def test_what_was_compiled_is_launched_with_the_constants_in_their_order() -> None:
    function = Function()
    kernel = Kernel(function)
    kernel[GRID](X, 5, 64, BLOCK=16, ROWS=2, num_warps=4)
    assert function.calls == [((3, 2, 1), X, 5, 64, {"BLOCK": 16, "ROWS": 2, "num_warps": 4})]
    kernel[(1,)](X, 6, 64, BLOCK=16, ROWS=2, num_warps=4)
    assert len(function.calls) == 1
    assert function.compiled.launches == [((1, 1, 1), X, 6, 64, 2, 16)]


@pytest.mark.parametrize(
    ("x", "width", "constants"),
    [
        (X.to(torch.bfloat16), 64, {}),
        (X[1:], 64, {}),  # no multiple of 16 bytes
        (X, 1, {}),
        (X, 48, {}),
        (X, 64, {"ROWS": 4}),
        (X, 64, {"num_warps": 8}),
    ],
)
def test_other_types_alignments_numbers_and_constants_are_triton_s(
    x: torch.Tensor, width: int, constants: dict[str, int]
) -> None:
    function = Function()
    kernel = Kernel(function)
    usual = {"ROWS": 2, "BLOCK": 16, "num_warps": 4}
    kernel[GRID](X, 5, 64, **usual)
    kernel[GRID](x, 5, width, **usual | constants)
    assert len(function.calls) == 2
    assert not function.compiled.launches


def test_a_constant_may_be_positional() -> None:
    function = Function()
    kernel = Kernel(function)
    for block in (16, 32, 32):
        kernel[GRID](X, 5, 64, 2, block)
    assert len(function.calls) == 2
    assert function.compiled.launches == [((3, 2, 1), X, 5, 64, 2, 32)]


def test_what_triton_interprets_is_not_kept() -> None:
    function = Function()
    function.is_interpreted = True
    kernel = Kernel(function)
    for _ in range(2):
        kernel[GRID](X, 5, 64, ROWS=2, BLOCK=16)
    assert len(function.calls) == 2


def test_sizes() -> None:
    assert [cdiv(n, 4) for n in (1, 4, 5, 8)] == [1, 1, 2, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(("early", "options"), [(True, {"launch_pdl": True}), (False, {})])
def test_only_a_kernel_that_may_start_early_has_the_option(early: bool, options: dict[str, bool]) -> None:
    function = Function()
    Kernel(function)[GRID](X, 5, 64, ROWS=2, BLOCK=16, EARLY=early)
    assert function.calls[0][-1] == {"ROWS": 2, "BLOCK": 16, "EARLY": early, **options}
