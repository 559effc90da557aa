"""Runs with 8-bit weights, from a checkpoint or engine: transformers' tokens with dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.layouts import Answers, check, layout, oracle
from tests.helpers.support import USAGE, Starter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mpillm.engine.build_engine import build  # noqa: E402
from mpillm.engine.weights.quantize import quantize  # noqa: E402 - needs torch
from tests.helpers.presets import save_preset  # noqa: E402
from tests.helpers.quantized_models import dequantized  # noqa: E402

N_NEW = 16


def int8(preset: str, folder: Path) -> Answers:
    """Return a model of floats in `folder`/floats, in int8 in `folder`/int8, and what transformers answers
    with that."""
    save_preset(preset, folder / "floats")
    quantize(folder / "floats", folder / "int8", "int8")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        dequantized(folder / "int8", folder / "widened"), dtype=torch.float32
    )
    prompts = [np.random.default_rng(i).integers(3, 512, 1 + 11 * i % 50).tolist() for i in range(8)]
    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"input_tokens": prompt}) + "\n" for prompt in prompts))
    return dataset, oracle(model, prompts, N_NEW)


def test_int8_weights_on_two_ranks(one: Starter, tmp_path: Path) -> None:
    """Weights are quantised at load, and an engine for two stages is built from the quantised checkpoint."""
    answers = int8("tiny-llama", tmp_path)
    check(
        one,
        tmp_path / "floats",
        2,
        answers,
        *layout(2),
        "--quantization",
        "int8",
        n_new=N_NEW,
        name="at-load",
    )
    build(tmp_path / "int8", tmp_path / "built", 1, 2)
    check(
        one,
        tmp_path / "int8",
        2,
        answers,
        *layout(1, 2),
        "--engine_dir",
        tmp_path / "built",
        n_new=N_NEW,
        name="engine",
    )
    ended = one.run(
        3, "--model_path", tmp_path / "int8", *layout(2), "--engine_dir", tmp_path / "built", core="torch"
    ).must(USAGE)
    assert "built for TP 1, PP 2, EP 1; instance 0 has TP 2, PP 1, EP 1" in ended.message


def test_int8_experts_on_two_ranks(one: Starter, tmp_path: Path) -> None:
    check(one, tmp_path / "int8", 2, int8("tiny-mixtral", tmp_path), *layout(2, 1, 2), n_new=N_NEW)
