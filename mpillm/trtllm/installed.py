"""TensorRT-LLM as installed: release, scripts of its repository, programs, a Python, GPUs.

Nothing here imports TensorRT-LLM, which is slow and needs GPUs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from disagg.errors import ConfigError
from launch.command import NotHere, find_program
from mpillm.devices import visible_gpus
from mpillm.options.run_config import RunConfig
from mpillm.stages.preconditions import raise_or_note
from mpillm.trtllm.server_kind import TRTLLM_SERVE

_PLACES = (Path("build/TRTLLM"), Path("/app/tensorrt_llm"))
"""TensorRT-LLM's repository without --trtllm_lib_path: in NVIDIA's harness, and in the containers."""


LAST_WITH_ENGINES = "1.3.0rc20"
"""Last release with trtllm-build, convert_checkpoint.py, the Executor and Triton's C++ backend."""

_BUILD = "commands/build.py"  # the source of trtllm-build, in the package


class InstalledRelease(NamedTuple):
    """A release; both empty if unknown."""

    version: str
    folder: Path  # of the package

    @property
    def has_engines(self) -> bool:
        """Whether it may have TensorRT engines: an early or unknown release, or one with trtllm-build."""
        return _order(self.version) <= _order(LAST_WITH_ENGINES) or (self.folder / _BUILD).is_file()


def installed_release() -> InstalledRelease:
    """Return the release in this Python, else that of the `trtllm-serve` in PATH."""
    try:
        version = importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:
        release = TRTLLM_SERVE.release()
        return InstalledRelease(release.version, release.folder) if release else InstalledRelease("", Path())
    spec = importlib.util.find_spec("tensorrt_llm")
    return InstalledRelease(version, Path(spec.origin).parent if spec and spec.origin else Path())


def no_engines(source: str, version: str) -> ConfigError:
    """Return the error for a release that has only the PyTorch backend."""
    return ConfigError(
        f"{source}: TensorRT-LLM {version} runs no engines; {LAST_WITH_ENGINES} is the last release that does"
        " (stable: 1.2); use the Hugging Face folder, with --core_type trtllm_hlapi, --server=trtllm-serve,"
        " or in tritonserver the model.yaml of the LLM API backend",
        about=["core_type", "trtllm_runtime_flags"],
    )


def check_engines(source: str) -> None:
    """Raise ConfigError if the installed release surely has no engines.

    `source`: the option or the file that needs engines.
    """
    if not (release := installed_release()).has_engines:
        raise no_engines(source, release.version)


def _order(version: str) -> tuple[int, int, int, float]:
    """Return a version's place in the order of releases; candidates are before their release."""
    if (match := re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?(?:rc(\d{1,9}))?", version)) is None:
        return (0, 0, 0, 0)
    major, minor, patch, candidate = match.groups()
    return int(major), int(minor), int(patch or 0), float(candidate or math.inf)


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
