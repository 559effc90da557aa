"""Dummy weights depend only on their names and look random."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mpillm.engine.shape.read_config import load_model_config
from mpillm.engine.weights.sources import DummyWeights
from tests.helpers.oracle import Tokens
from tests.helpers.torch_cores import N_OUTPUT


@pytest.mark.long
def test_dummy_weights_do_not_make_an_answer_that_repeats(expected: Tokens) -> None:
    assert np.mean([len(set(tokens)) for tokens in expected]) > N_OUTPUT / 3


def test_dummy_weights_depend_only_on_the_name() -> None:
    config = load_model_config("tiny-llama")
    few = dataclasses.replace(config, n_layers=2)
    a, b = DummyWeights(config), DummyWeights(few)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(a.get(name), b.get(name))
    assert torch.equal(a.get(name)[5:9], a.get(name, slice(5, 9)))
    assert not torch.equal(a.get(name), a.get("model.layers.0.mlp.down_proj.weight"))


def test_a_part_of_dummy_weights_is_made_alone() -> None:
    """A part is made without the whole matrix, which would take 3.5 GB.

    The values never change: these are from other versions and machines.
    """
    source = DummyWeights(load_model_config("llama3.1-405b"))
    name = "model.layers.0.mlp.gate_proj.weight"
    part = source.get(name, slice(50_000, 50_003), slice(16_000, 16_004))
    assert torch.equal(
        part, source.get(name, slice(49_000, 51_000), slice(15_000, None))[1000:1003, 1000:1004]
    )
    assert (part * 128 * 147.8).round().int().tolist() == [
        [-198, -89, 116, -92],
        [44, 274, -10, -14],
        [-50, 192, -102, -43],
    ]


def test_dummy_weights_look_random() -> None:
    config = dataclasses.replace(load_model_config("tiny-llama"), vocab_size=1024, hidden_size=1024)
    x, y = (
        DummyWeights(config).get(name).double() * scale
        for name, scale in (("lm_head.weight", 32), ("model.embed_tokens.weight", 10))
    )
    assert abs(x.mean()) < 0.003 and abs(x.std() - 1) < 0.003
    assert abs((x * y).mean()) < 0.004
    assert abs((x[1:] * x[:-1]).mean()) < 0.004 and abs((x[:, 1:] * x[:, :-1]).mean()) < 0.004
    # of a random matrix: 2; rows or columns that are alike show here
    assert torch.linalg.svdvals(x)[0] < 2.05 * 1024**0.5
