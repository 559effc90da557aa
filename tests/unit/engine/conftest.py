"""Fixtures of the engine's tests: a tiny model, prompts, and what transformers answers to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpillm.engine.weights.sources import save_preset
from tests.helpers.oracle import Oracle, Tokens
from tests.helpers.torch_cores import N_OUTPUT


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of tiny-llama."""
    path = tmp_path_factory.mktemp("tiny-llama")
    save_preset("tiny-llama", path)
    return path


@pytest.fixture(scope="session")
def prompts() -> Tokens:
    """Return 20 prompts, some of them as long as a block, or one token shorter or longer."""
    rng = np.random.default_rng(7)
    lengths = [1, 2, 3, 31, 32, 33, *rng.integers(4, 90, 14).tolist()]
    return [rng.integers(0, 512, n).tolist() for n in lengths]


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Oracle:
    """Return the model of `folder` in transformers."""
    return Oracle(folder)


@pytest.fixture(scope="session")
def expected(oracle: Oracle, prompts: Tokens) -> Tokens:
    """Return the greedy answers to `prompts`."""
    return [oracle.tokens(prompt, N_OUTPUT) for prompt in prompts]
