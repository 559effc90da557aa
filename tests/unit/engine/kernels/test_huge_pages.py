"""Weights move to huge pages with their numbers, and nothing goes wrong where there are none."""

from __future__ import annotations

import torch

from mpillm.engine.kernels.huge_pages import use_huge_pages


def test_numbers_stay() -> None:
    numbers = torch.arange(3 << 20, dtype=torch.int32)
    use_huge_pages(numbers.data_ptr(), numbers.nbytes)
    assert torch.equal(numbers, torch.arange(3 << 20, dtype=torch.int32))


def test_memory_that_is_not_there() -> None:
    """The page at address 0 is never mapped."""
    use_huge_pages(0, 4 << 20)
