"""Weights in another form: the message names what the folder has, and the remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from mpillm.engine.shape.model_info import model_info
from tests.helpers.engine_configs import engine_config
from tests.helpers.presets import save_preset

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_preset("tiny-llama", folder)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        model_info(engine_config(folder))
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "model.safetensors: no such file"),
        (["pytorch_model.bin"], "the folder has pytorch_model.bin: save it as safetensors: `python3 -c"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"], "-00002.bin and 1 more: "),
        (["consolidated.safetensors"], "consolidated.safetensors: Mistral's own form, with"),
        (["tiny.Q4_K_M.gguf"], "tiny.Q4_K_M.gguf: convert it: `python -m mpillm fetch-model"),
        (["adapter_model.safetensors"], "adapter_model.safetensors: it is an adapter; name its base model"),
        (["weights.safetensors"], "weights.safetensors: rename it: `mv"),
        (["a.safetensors", "b.safetensors"], "a.safetensors and 1 more: fetch the model's"),
        (["model-00001-of-00002.safetensors"], "model-00001-of-00002.safetensors: truncated"),
    ],
)
def test_no_safetensors(model: Path, tmp_path: Path, names: list[str], expected: str) -> None:
    shutil.copy(model / "config.json", tmp_path)
    for name in names:
        (tmp_path / name).touch()
    message = refusal(tmp_path)
    assert str(tmp_path) in message and expected in message


def test_a_stray_file_beside_an_index(model: Path, tmp_path: Path) -> None:
    """The index says which files are the model's."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(model / "model.safetensors")
    shutil.copy(model / "config.json", tmp_path)
    safetensors.save_file(tensors, tmp_path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").write_text("another model's")
    assert model_info(engine_config(tmp_path)).folder == tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "pytorch_model.bin: a Git LFS pointer, not the file; fetch it: `git -C"),
        ("tiny.gguf", "tiny.gguf: a Git LFS pointer"),
        ("weights.safetensors", "weights.safetensors: a Git LFS pointer"),
        ("consolidated.safetensors", "consolidated.safetensors: Mistral's own form"),
    ],
)
def test_a_pointer_to_other_weights(model: Path, tmp_path: Path, name: str, message: str) -> None:
    """A pointer cannot be converted; the file itself may still be in another form."""
    shutil.copy(model / "config.json", tmp_path)
    (tmp_path / name).write_bytes(POINTER)
    assert message in refusal(tmp_path)


def test_git_lfs(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(POINTER)
    assert f"model.safetensors: a Git LFS pointer, not the file; fetch it: `git -C {tmp_path} lfs pull`" in (
        refusal(tmp_path)
    )
    (tmp_path / "config.json").write_bytes(POINTER)
    assert "config.json: a Git LFS pointer" in refusal(tmp_path)


def test_shards_without_an_index(model: Path, tmp_path: Path) -> None:
    """All of them are read; a missing one is named."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(model / "model.safetensors")
    shutil.copy(model / "config.json", tmp_path)
    names = sorted(tensors)
    for i, part in enumerate((names[:7], names[7:]), 1):
        file = tmp_path / f"model-{i:05}-of-00002.safetensors"
        safetensors.save_file({name: tensors[name] for name in part}, file)
    assert model_info(engine_config(tmp_path)).folder == tmp_path
    assert torch.equal(safetensors.load_file(file)[names[-1]], tensors[names[-1]])
    file.unlink()
    missing = "model-00002-of-00002.safetensors: no such file"
    assert f"{missing}; the folder has model-00001-of-00002.safetensors: fetch" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": file.name, "b": "model-00001-of-00002.safetensors"}})
    )
    safetensors.save_file(tensors, tmp_path / "model.safetensors")  # a stray file
    assert f"{missing}, but model.safetensors.index.json names it; fetch it" in refusal(tmp_path)


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (file := tmp_path / "it's.gguf").touch()
    assert "a GGUF file, not a folder; convert it: `python -m mpillm fetch-model '" in refusal(file)
    (other := tmp_path / "model.safetensors").touch()
    assert "a file, not a folder with config.json and weights" in refusal(other)
    assert "no config.json; the folder has it's.gguf: convert it" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({}))
