"""Find the model that `--model_path` names.

A model is a Hugging Face folder (`config.json`, `*.safetensors`, `generation_config.json`) or the name of a
preset: a `config.json` that comes with mpillm, for seeded random weights.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from disagg.errors import ConfigError, about, nearest
from mpillm.data.other_weights import other_weights
from mpillm.files import check_files, path_exists

PRESETS = Path(__file__).parent / "presets"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # a model's id on the Hugging Face hub


def presets() -> list[str]:
    return sorted(file.stem for file in PRESETS.glob("*.json"))


def is_preset(name: str) -> bool:
    """Return whether a preset has this name."""
    return "/" not in name and (PRESETS / f"{name}.json").is_file()


@about("model_path")
def locate(model_path: str) -> tuple[Path, Path | None]:
    """Return config.json and the folder (None for a preset). Raises ConfigError if neither exists."""
    folder = model_folder(model_path)
    if folder is None:
        return PRESETS / f"{model_path}.json", None
    check_files(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model_path {model_path}: no model there: the folder has no config.json{other_weights(folder)}"
        )
    return folder / "config.json", folder


@about("model_path")
def model_folder(model_path: str) -> Path | None:
    """Return the folder that --model_path names; None for a preset, unless a folder has its name.

    Raises ConfigError if neither a folder nor a preset has the name.
    """
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    if is_preset(model_path):
        return None
    if folder.suffix == ".gguf" and path_exists(folder):
        raise ConfigError(
            f"--model_path {model_path}: a GGUF file, not a folder; convert it: `python -m mpillm fetch-model"
            f" {shlex.quote(model_path)}`, which prints the folder for --model_path"
        )
    if path_exists(folder):
        raise ConfigError(f"--model_path {model_path}: a file, not a folder with config.json and weights")
    if _HUB_ID.fullmatch(model_path):
        where = f"models/{folder.name}"
        raise ConfigError(
            f"--model_path {model_path}: no such folder; a model of the Hugging Face hub must be"
            f" fetched first: `hf download {model_path} --local-dir {where}` (pip install huggingface_hub),"
            f" then --model_path {where}"
        )
    known = presets()
    raise ConfigError(
        f"--model_path {model_path}: no such folder, and no such preset{nearest(model_path, known)};"
        f" presets: {', '.join(known)}"
    )
