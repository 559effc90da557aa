"""docs/howto/pipeline.md: its LLaMA sequence runs with stand-ins, and --dry_run prints what the page says."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from mpillm.cli import main
from tests.helpers.trtllm_stand_in import make_library, make_model

PAGE = (
    (Path(__file__).parents[3] / "docs" / "howto" / "pipeline.md")
    .read_text(encoding="utf-8")
    .partition("## The LLaMA workflow")[2]
)


def test_the_llama_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_args = re.search(r'export RUN_ARGS="(--harness_type=triton.*?)"\n', PAGE, re.DOTALL)
    example = re.search(r"(\$ make generate_engines .*?)\n```", PAGE, re.DOTALL)
    assert run_args and example
    words = shlex.split(run_args[1].replace("\\\n", ""))
    monkeypatch.chdir(tmp_path)
    for name in ("TRTLLM_CHECKPOINT_FLAGS", "TRTLLM_BUILD_FLAGS", "TRTLLM_RUNTIME_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    library = make_library(Path("build/TRTLLM"))
    make_model(
        Path("build/models/Meta-Llama-3-8B-Instruct"),
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=32,
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    build = tmp_path / library / "tensorrt_llm/commands/build.py"
    for name, text in (("trtllm-build", f'exec {sys.executable} {build} "$@"'), ("tritonserver", "exit 1")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    lines = []
    for target in ("generate_engines", "generate_triton_config", "run_llm_server"):
        lines.append(f'$ make {target} RUN_ARGS="$RUN_ARGS --dry_run"')
        assert main([target, *words, "--dry_run"]) == 0
        lines += capsys.readouterr().out.splitlines()
        if target != "run_llm_server":
            assert main([target, *words]) == 0
            capsys.readouterr()
    printed = re.sub(
        r"^/\S*/(?=(python3|trtllm-build|tritonserver)[. ]?)", "", "\n".join(lines), flags=re.MULTILINE
    )
    assert re.sub(r"^python3\.\d+ ", "python3 ", printed, flags=re.MULTILINE) == example[1]
