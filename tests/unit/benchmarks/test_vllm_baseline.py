"""`benchmarks engine --against vllm`: the turns of another Python's vLLM, with a stand-in for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.vllm_baseline import VllmBaseline
from disagg.errors import ConfigError
from launch.children import Children

# Answers are the prompt's last token, again and again; a prompt of 666 ends it.
VLLM = """
import os
from types import SimpleNamespace as Some

__version__ = "9.9"

class SamplingParams:
    def __init__(self, **given):
        assert given == {"temperature": 0.0, "max_tokens": 3, "min_tokens": 3, "detokenize": False}
        self.n = given["max_tokens"]

class LLM:
    def __init__(self, model, dtype):
        assert (model, dtype) == ("folder", "bfloat16") and os.environ["VLLM_CPU_OMP_THREADS_BIND"]

    def generate(self, prompts, params, use_tqdm):
        tokens = [prompt["prompt_token_ids"] for prompt in prompts]
        if [666] in tokens:
            raise RuntimeError("the engine is dead")
        return [Some(outputs=[Some(token_ids=prompt[-1:] * params.n)]) for prompt in tokens]
"""


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as started:
        yield started


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Return a Python that finds the stand-in though it looks into no folder of this environment."""
    (tmp_path / "vllm.py").write_text(VLLM)
    program = tmp_path / "python"
    code = (
        f"import runpy, sys; sys.path.append({str(tmp_path)!r}); sys.argv = sys.argv[2:];"
        " runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_turns(python: str, children: Children, tmp_path: Path) -> None:
    vllm = VllmBaseline(python, children, tmp_path, 1, model="folder", dtype="bfloat16")
    assert vllm.versions.startswith("vLLM 9.9, PyTorch 2.")
    for _ in range(2):
        assert vllm.answer([[1, 2], [3]], 3) == [[2, 2, 2], [3, 3, 3]]
    (child,) = children.running()
    vllm.close()
    assert children.wait(child, 300) == 0


def test_it_ends_in_a_turn(python: str, children: Children, tmp_path: Path) -> None:
    vllm = VllmBaseline(python, children, tmp_path, 1, model="folder", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"vLLM ended; the end of its output:\n(?s:.*)the engine is dead"):
        vllm.answer([[666]], 3)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("no-such-python", "--vllm_python no-such-python: there is no such program"),
        (sys.executable, "No module named 'vllm'"),
        ("false", "vLLM did not start"),
    ],
)
def test_it_is_not_there(program: str, message: str, children: Children, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmBaseline(program, children, tmp_path, 1)
