"""Of every family: what is wrong with a checkpoint is said in one message, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.engine.shape.families.known import FAMILIES
from mpillm.engine.shape.model_info import model_info
from tests.helpers.engine_configs import engine_config

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from tests.helpers.families import make_family, pack_experts  # noqa: E402

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Mistral's tensors are Llama's: only config.json says that there is a window.
TWINS = {"LlamaForCausalLM", "MistralForCausalLM"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a tiny model of each family."""
    folder = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        make_family(name, folder / name)
    return {name: folder / name for name in FAMILIES}


def refusal(folder: Path) -> str:
    """Return the message; a call of `model_info` reads headers and scales only."""
    with pytest.raises(ConfigError) as caught:
        model_info(engine_config(folder, max_seq_len=200))
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message


def copied(model: Path, tensors: dict[str, Any], folder: Path) -> Path:
    """Write a model's configuration and `tensors`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_is_missing_or_has_another_shape(
    models: dict[str, Path], family: str, tmp_path: Path
) -> None:
    whole = load_file(models[family] / FILE)
    model_info(engine_config(str(models[family]), max_seq_len=200))
    for name, x in whole.items():
        others = {other: y for other, y in whole.items() if other != name}
        message = refusal(copied(models[family], others, tmp_path / "missing"))
        assert "no tensor" in message and name.removeprefix("transformer.") in message
        longer = {**others, name: torch.cat([x, x[:1]])}
        message = refusal(copied(models[family], longer, tmp_path / "longer"))
        assert f"tensor {name.removeprefix('transformer.')} has shape" in message.replace("transformer.", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_half_downloaded(models: dict[str, Path], family: str, tmp_path: Path) -> None:
    """A file ends early, or has not come yet."""
    whole = load_file(models[family] / FILE)
    folder = copied(models[family], whole, tmp_path)
    data = (folder / FILE).read_bytes()
    for n in (0, 7, 100, len(data) // 2, len(data) - 1):
        (folder / FILE).write_bytes(data[:n])
        assert "truncated" in refusal(folder)
    (folder / FILE).unlink()
    assert "no such file" in refusal(folder)
    names = sorted(whole)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    save_file({name: whole[name] for name in names[::2]}, folder / "model-1.safetensors", {"format": "pt"})
    weight_map = {name: part for part, some in parts.items() for name in some}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "model-2.safetensors: no such file" in refusal(folder)


def test_weights_of_another_family(models: dict[str, Path], tmp_path: Path) -> None:
    for described in FAMILIES:
        for held in FAMILIES:
            if described != held and {described, held} != TWINS:
                refusal(copied(models[described], load_file(models[held] / FILE), tmp_path / "other"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_is_not_built(models: dict[str, Path], family: str, tmp_path: Path) -> None:
    folder = copied(models[family], load_file(models[family] / FILE), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for other in (["Phi3ForCausalLM"], [], None):
        change = {"architectures": other, "model_type": "phi3"}
        (folder / "config.json").write_text(json.dumps(config | change))
        message = refusal(folder)
        assert "supported: " in message and family in message


def test_scales_of_packed_experts_that_are_no_number(tmp_path: Path) -> None:
    pack_experts(make_family("GptOssForCausalLM", tmp_path), tmp_path)
    whole = load_file(tmp_path / FILE)
    name = next(name for name in whole if name.endswith("_scales"))
    whole[name][-1, -1, -1] = 255
    save_file(whole, tmp_path / FILE, {"format": "pt"})
    assert f"tensor {name} has scales that are negative or not finite" in refusal(tmp_path)
