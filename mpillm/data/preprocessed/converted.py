"""Data frames as memory-mapped arrays, converted once.

A conversion is a folder of .npy files: ``FILE.arrays/KEY`` beside the data frame or, if that is not writable,
in the user's cache. KEY identifies the state of the file, so a changed file is converted again. The folder is
written under a temporary name, then renamed, because two runs may convert the same file simultaneously, and a
run may be killed during a conversion.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.text_file import check_file
from mpillm.files import cache_folder, replace_folder

Arrays = Mapping[str, NDArray[Any]]

_FORMAT = 1  # of the arrays; a higher number makes mpillm convert every file again
_WORTHWHILE = 1 << 20  # bytes; smaller files read as fast as arrays
_CONTENTS = "contents.json"  # names of all arrays, because a program that cleans the disk may delete some
_SAMPLE, _SAMPLES = 4096, 64  # the key covers 64 samples of the content, with 4096 bytes each
_STALE_S = 3600.0  # no conversion takes longer


def converted(file: Path, purpose: str, convert: Callable[[], Arrays]) -> tuple[Arrays, str]:
    """Return the arrays that `convert` makes of `file`, and a note. Arrays of an earlier run are mapped.

    The note is a line for the user, or empty. `purpose` identifies the inputs of `convert` other than the
    file. A failure to store the conversion is not an error.
    """
    try:
        key = _key(file, purpose) if file.stat().st_size >= _WORTHWHILE else ""
    except OSError:  # `convert` reports the cause
        key = ""
    if not key:
        return convert(), ""
    folders = [folder / key for folder in _folders(file)]
    for folder in folders:
        if (stored := _read(folder)) is not None:
            return stored, ""
    arrays = convert()
    reasons = []
    for folder in folders:
        try:
            if _key(file, purpose) == key:
                _write(folder, arrays)
                _remove_old(folder)
                return arrays, f"data set converted for later runs: {folder.parent}"
            reasons.append(f"{file} changed while it was read")
            break
        except OSError as error:
            reasons.append(f"{error.filename or folder}: {error.strerror or error}")  # NumPy has no strerror
    return arrays, f"data set converted, but not stored for later runs: {'; '.join(reasons)}"


def _key(file: Path, purpose: str) -> str:
    """Return a hash of size, times and samples of the content. Copy programs can set mtime, but not ctime."""
    stat = file.stat()
    digest = hashlib.sha256(f"{_FORMAT} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}".encode())
    with file.open("rb", buffering=0) as stream:
        for place in np.linspace(0, max(stat.st_size - _SAMPLE, 0), _SAMPLES, dtype=np.int64).tolist():
            stream.seek(place)
            digest.update(stream.read(_SAMPLE))
    return f"{_short(purpose)}-{digest.hexdigest()[:32]}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _folders(file: Path) -> Iterator[Path]:
    """Yield the folders that may hold conversions of `file`, in order of preference."""
    yield file.with_name(f"{file.name}.arrays")
    with contextlib.suppress(RuntimeError):  # no home directory
        yield cache_folder() / "datasets" / f"{_short(str(file.resolve()))}-{file.name}"


def load_npy(file: Path, is_mapped: bool) -> Any:
    """Return the array in a .npy file, or an archive of arrays.

    Raises OSError, EOFError, ConfigError for a pipe or a device, and ValueError for any other fault.
    """
    check_file(file)
    try:
        return np.load(file, "r" if is_mapped else None, allow_pickle=False)
    # For a null byte in the header, Python 3.12 raises SystemError instead of SyntaxError.
    except (ArithmeticError, MemoryError, SyntaxError, SystemError, TypeError, tokenize.TokenError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read(folder: Path) -> Arrays | None:
    """Return a stored conversion; None if it is missing or damaged."""
    try:
        arrays: dict[str, NDArray[Any]] = {}
        for name in json.loads((folder / _CONTENTS).read_text(encoding="utf-8")):
            file = folder / f"{name}.npy"
            # An empty array cannot be mapped.
            arrays[name] = load_npy(file, is_mapped=file.stat().st_size > _SAMPLE)
    except (OSError, TypeError, ValueError, EOFError, RecursionError):
        return None
    return arrays


def _write(folder: Path, arrays: Arrays) -> None:
    """Store a conversion. Raises OSError if that fails."""
    work = folder.with_name(f".{secrets.token_hex(8)}")
    damaged = work.with_suffix(".damaged")
    work.mkdir(parents=True)
    try:
        for name, array in arrays.items():
            with (work / f"{name}.npy").open("wb") as stream:
                np.save(stream, array)
                stream.flush()
                # After a crash of the machine, a renamed folder must not have empty files.
                os.fsync(stream.fileno())
        (work / _CONTENTS).write_text(json.dumps(list(arrays)), encoding="utf-8")
        replace_folder(work, folder, damaged, lambda: _read(folder) is not None)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(damaged, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # fails unless the folder is empty


def _remove_old(folder: Path) -> None:
    """Remove conversions of earlier states of the file, and unfinished conversions of killed runs."""
    purpose = folder.name.partition("-")[0]
    for other in folder.parent.iterdir():
        with contextlib.suppress(OSError):
            left = other.name.startswith(".") and other.stat().st_mtime < time.time() - _STALE_S
            if left or (other.name.startswith(f"{purpose}-") and other != folder):
                shutil.rmtree(other)
