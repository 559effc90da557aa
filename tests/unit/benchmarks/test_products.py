"""`benchmarks products` shows what compiled products gain, where there are any."""

from __future__ import annotations

import shutil

import pytest
import torch

from benchmarks.products import product_rates
from mpillm.engine.shape.read_config import load_model_config
from tests.helpers.compilers import no_compiler


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_each_number_of_rows_has_both_rates() -> None:
    rates = product_rates(load_model_config("tiny-llama"), torch.float32, (1, 40))
    assert rates is not None and len(rates) == 2
    assert all(0 < rate < 1e5 for both in rates for rate in both)


def test_without_a_compiler_there_are_none() -> None:
    with no_compiler():
        assert product_rates(load_model_config("tiny-llama"), torch.float32, (1,)) is None
