"""Who says how PyTorch takes a GPU's memory: the environment before the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpillm.engine.tensors import segments


@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_environment_comes_first(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[Any] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:64")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    segments.grow_segments()
    with pytest.raises(ZeroDivisionError), segments.fixed_segments():
        print(1 / 0)
    modes = ["True", "False", "True"] if variable is None else []
    assert settings == [f"expandable_segments:{mode}" for mode in modes]
