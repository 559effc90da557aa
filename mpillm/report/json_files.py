"""JSON files of a run directory: read with errors that name them, written whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError


def read_json(path: Path) -> Any:
    """ConfigError: the file can't be read or is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write `value` whole or not at all; OSError if the disk is full."""
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
