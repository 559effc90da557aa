"""Shapes and checkpoints of Llama and Mixtral give the tokens of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mpillm.engine.model.rope import rotations
from mpillm.engine.shape.read_config import load_model_config
from tests.helpers.oracle import Tokens, expected_tokens
from tests.helpers.presets import preset_json, save_preset
from tests.helpers.torch_cores import N_OUTPUT, answer, make_batch, make_core


@pytest.mark.long
def test_a_preset_has_the_weights_of_its_folder(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    assert answer(make_core("tiny-llama"), make_batch(prompts[:4])) == expected[:4]
    assert answer(make_core(folder, load_format="dummy"), make_batch(prompts[:4])) == expected[:4]


def test_a_checkpoint_in_several_files(
    folder: Path, prompts: Tokens, expected: Tokens, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert answer(make_core(tmp_path), make_batch(prompts[:6])) == expected[:6]


YARN = {"rope_type": "yarn", "rope_theta": 500.0}


@pytest.mark.parametrize(
    "change",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 8, "head_dim": None, "intermediate_size": 72},
        {"num_key_value_heads": 1, "head_dim": 32},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_theta": 500.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {"rope_parameters": {**YARN, "factor": 8.0, "original_max_position_embeddings": 64}},
        {
            "rope_parameters": {
                **YARN,
                "factor": 40.0,
                "original_max_position_embeddings": 16,
                "beta_slow": 0.3,
                "truncate": False,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            }
        },
    ],
    ids=lambda change: next(reversed(change)),
)
@pytest.mark.long
def test_other_shapes_of_llama(tmp_path: Path, prompts: Tokens, change: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    save_preset("tiny-llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | {"initializer_range": 0.1}))
    model.save_pretrained(tmp_path)
    few = prompts[4:12]
    assert answer(make_core(tmp_path, max_num_tokens=60), make_batch(few)) == expected_tokens(
        tmp_path, few, N_OUTPUT
    )


@pytest.mark.parametrize("preset", ["llama3.1-8b", "llama3.1-405b", "llama2-70b", "mixtral-8x7b"])
def test_rotary_embeddings_equal_those_of_transformers(preset: str) -> None:
    """Positions up to the last one are equal, before and after the length that Llama 3.1 was first trained
    for."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = load_model_config(preset)
    raw = {
        key: value for key, value in preset_json(preset).items() if key not in ("architectures", "model_type")
    }
    last = config.max_position_embeddings - 1
    positions = torch.tensor(
        [[p for p in (0, 1, 77, 4095, 8191, 8192, 8193, 20_000, 65_536) if p < last] + [last]]
    )
    cos, sin = LlamaRotaryEmbedding(transformers.LlamaConfig(**raw))(torch.zeros(1), positions)
    turned = rotations(config, last + 1)[positions[0]]
    half = config.head_dim // 2
    torch.testing.assert_close(turned.real, cos[0, :, :half], atol=2e-5, rtol=0)
    torch.testing.assert_close(turned.imag, sin[0, :, :half], atol=2e-5, rtol=0)


@pytest.mark.long
def test_a_prompt_beyond_the_length_of_the_first_training(tmp_path: Path) -> None:
    """Llama 3.1's rope scaling holds for a context of more than 8192 tokens."""
    save_preset("tiny-llama", tmp_path)
    rope = {
        name: preset_json("llama3.1-8b")[name]
        for name in ("rope_theta", "rope_scaling", "max_position_embeddings")
    }
    config = json.loads((tmp_path / "config.json").read_text()) | rope | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "model.safetensors"
    kept = {n: tensor for n, tensor in load_file(weights).items() if not re.match(r"model\.layers\.[2-9]", n)}
    save_file(kept, weights)
    prompts = [np.random.default_rng(i).integers(0, 512, 8230).tolist() for i in range(1)]
    core = make_core(tmp_path, max_seq_len=8300, max_num_tokens=2048, tokens_per_block=64)
    assert answer(core, make_batch(prompts, max_output=6)) == expected_tokens(tmp_path, prompts, 6)


@pytest.mark.long
def test_mixtral_equals_transformers(prompts: Tokens, tmp_path: Path) -> None:
    save_preset("tiny-mixtral", tmp_path)
    few = prompts[:10]
    wanted = expected_tokens(tmp_path, few, N_OUTPUT)
    assert answer(make_core("tiny-mixtral", max_num_tokens=50), make_batch(few)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["llama2-7b", "llama2-13b", "llama2-70b", "llama3.1-8b", "mixtral-8x7b"])
def test_a_layer_of_a_preset_runs(tmp_path: Path, preset: str) -> None:
    """One layer of each preset computes at its true width, in bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps(preset_json(preset) | {"num_hidden_layers": 1}))
    prompts = [np.random.default_rng(i).integers(0, 32000, 9 + i).tolist() for i in range(4)]
    answers = answer(
        make_core(tmp_path, load_format="dummy", dtype="bfloat16"), make_batch(prompts, max_output=6)
    )
    assert all(len(set(tokens)) > 1 for tokens in answers)
    assert len({tuple(tokens) for tokens in answers}) == 4
