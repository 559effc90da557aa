"""Adapters of PEFT that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.errors import ConfigError
from mpillm.triton.peft_adapter import convert

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    return folder


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_a_pointer_of_git_lfs(tmp_path: Path, name: str) -> None:
    (adapter(tmp_path) / name).write_bytes(POINTER)
    with pytest.raises(ConfigError, match=f"{name}: a Git LFS pointer, not the file; fetch it"):
        convert(tmp_path, "float16")


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 and then nothing", b"\x80\x02."])
def test_a_damaged_file(tmp_path: Path, content: bytes) -> None:
    (adapter(tmp_path) / "adapter_model.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=r"adapter_model.bin: damaged, or not PyTorch's file of tensors"):
        convert(tmp_path, "float16")


@pytest.mark.parametrize("value", [[1], {"name": 1}, {1: torch.zeros(1)}])
def test_a_file_of_other_values(tmp_path: Path, value: Any) -> None:
    torch.save(value, adapter(tmp_path) / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.bin: damaged, or not PyTorch's file of tensors"):
        convert(tmp_path, "float16")
