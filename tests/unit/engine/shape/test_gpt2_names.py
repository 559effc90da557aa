"""GPT-2's checkpoints: parts of its matrices, with and without the names' prefix; engines; 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.engine.shape.read_config import load_model_config
from tests.helpers.families import make_family
from tests.helpers.torch_cores import N_OUTPUT, answer, make_batch, make_core

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from mpillm.engine.build_engine import build  # noqa: E402
from mpillm.engine.weights.quantize import quantize  # noqa: E402
from mpillm.engine.weights.sources import Checkpoint  # noqa: E402
from tests.helpers.oracle import expected_tokens  # noqa: E402

PROMPTS = [[3 + (7 * i + 5 * j) % 300 for j in range(3 + 5 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gpt2")
    return folder, make_family("GPT2LMHeadModel", folder)


def without_prefix(folder: Path, target: Path) -> Path:
    """Write a folder as the hub's gpt2 is."""
    tensors = load_file(folder / "model.safetensors")
    names = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    save_file(names, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def test_parts_of_its_matrices(made: tuple[Path, Any]) -> None:
    folder, model = made
    source, layer = Checkpoint(folder, load_model_config(str(folder))), model.transformer.h[1]
    rows, columns, prefix = slice(8, 24), slice(16, 40), "model.layers.1"
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        part = slice(64 * i, 64 * i + 64)
        weight = source.get(f"{prefix}.self_attn.{name}.weight", rows, columns)
        assert torch.equal(weight, layer.attn.c_attn.weight.t()[part][rows, columns])
        bias = source.get(f"{prefix}.self_attn.{name}.bias", rows)
        assert torch.equal(bias, layer.attn.c_attn.bias[part][rows])
    found = source.get(f"{prefix}.mlp.c_proj.weight", slice(None), columns)
    assert torch.equal(found, layer.mlp.c_proj.weight.t()[:, columns])
    assert torch.equal(source.get("model.embed_positions.weight"), model.transformer.wpe.weight)


def test_names_without_a_prefix_and_an_engine(made: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = made
    wanted = expected_tokens(folder, PROMPTS, N_OUTPUT)
    bare = without_prefix(folder, tmp_path)
    assert answer(make_core(bare), make_batch(PROMPTS)) == wanted
    build(bare, tmp_path / "engine")
    core = make_core(bare, engine_dir=str(tmp_path / "engine"))
    assert answer(core, make_batch(PROMPTS)) == wanted


def test_eight_bits_are_made_as_it_is_loaded(made: tuple[Path, Any], tmp_path: Path) -> None:
    """Most first tokens stay; a checkpoint of them can't be written."""
    folder, _ = made
    wanted = expected_tokens(folder, PROMPTS, N_OUTPUT)
    found = answer(make_core(folder, quantization="int8"), make_batch(PROMPTS))
    assert sum(a[:1] == b[:1] for a, b in zip(found, wanted, strict=True)) >= 5
    with pytest.raises(ConfigError, match="which only --quantization of a run rounds"):
        quantize(folder, tmp_path / "int8", "int8")
