"""Requirements of TensorRT-LLM's tools and servers: scripts of its repository, programs, a Python, GPUs."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.command import NotHere, find_program
from mpillm.devices import visible_gpus
from mpillm.options.run_config import RunConfig
from mpillm.stages.preconditions import raise_or_note

_PLACES = (Path("build/TRTLLM"), Path("/app/tensorrt_llm"))
"""TensorRT-LLM's repository without --trtllm_lib_path: in NVIDIA's harness, and in the containers."""


def check_gpus(needed: int, user: str) -> None:
    """Raise ConfigError if `user` needs more GPUs than are visible."""
    gpus = visible_gpus()
    if gpus is not None and len(gpus) < needed:
        raise NotHere(f"{user} needs {needed} GPU{'s' if needed > 1 else ''}; {len(gpus)} are visible here")


def find_script(lib_path: Path | None, candidates: Sequence[str], option: str, must: bool) -> Path:
    """Return the first of `candidates` that exists, relative to TensorRT-LLM's repository.

    If none exists, raises ConfigError if `must`; otherwise returns the first candidate's path.
    """
    places = (lib_path,) if lib_path else _PLACES
    for place in places:
        for candidate in candidates:
            if (place / candidate).is_file():
                return place / candidate
    if not must:
        return places[0] / candidates[0]
    looked = " and ".join(str(place) for place in places)
    raise NotHere(
        f"{option}: no {candidates[0]} in {looked}; name the root of TensorRT-LLM's repository with {option}"
    )


def python_with_trtllm() -> str:
    """Return this Python if it has TensorRT-LLM, or else the `python3` in PATH, as in NVIDIA's containers."""
    if importlib.util.find_spec("tensorrt_llm") is not None:
        return sys.executable
    return shutil.which("python3") or sys.executable


def program_or_name(config: RunConfig, name: str, hint: str) -> str:
    """Return the path of a program; its name if it is missing in a dry run."""
    try:
        return find_program(name, hint)
    except NotHere as error:
        raise_or_note(config, error)
        return name
