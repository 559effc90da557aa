"""Fixtures of the engine's tests: a tiny model, prompts, and what transformers answers to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import draft_tokens
from tests.helpers.oracle import Oracle, Tokens
from tests.helpers.presets import save_preset
from tests.helpers.torch_cores import N_OUTPUT, answer, make_batch, make_core


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


@pytest.fixture(scope="session")
def repetitive() -> Tokens:
    """Return prompts in which tokens repeat."""
    rng = np.random.default_rng(11)
    return [rng.integers(0, 512, n).tolist() * 3 for n in (1, 3, 9, 10, 16, 21)] + [
        rng.integers(0, 512, n).tolist() for n in (1, 31, 40)
    ]


@pytest.fixture(scope="session")
def draft_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a draft model: the first half of tiny-llama's layers."""
    path = tmp_path_factory.mktemp("draft")
    draft_tokens.save_half(folder, path)
    return path


@pytest.fixture(scope="session")
def plain(folder: Path, repetitive: Tokens) -> Tokens:
    """Return the answers to `repetitive` without draft_tokens."""
    return answer(make_core(folder), make_batch(repetitive, max_output=draft_tokens.N_OUTPUT))
