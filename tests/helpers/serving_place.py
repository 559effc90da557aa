"""A folder in which run-llm-server finds programs, model repositories and a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def make_serving_place(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return `folder`, filled; `program` is the text of tritonserver and trtllm-serve, first in PATH."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("tritonserver", "trtllm-serve"):
        (programs / name).write_text(program)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("MLPERF_DISAGG_LAUNCH_TYPE", raising=False)
    for server in (0, 1):
        model = folder / f"repo_{server}" / f"model-{server}"
        model.mkdir(parents=True)
        (model / "config.pbtxt").write_text(
            'parameters { key: "gpu_device_ids" value { string_value: "0" } }'
        )
    (folder / "llama").mkdir()
    return folder
