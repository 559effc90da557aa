"""Files and folders: read with errors that name them, written or replaced atomically."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from disagg.text_file import check_file
from launch.masking import without_known

LFS_POINTER = b"version https://git-lfs"  # the start of what Git leaves in place of a large file
# Exceptions of code that gets data of another type or form than it expects.
DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_LONG_NUMBER = re.compile(rb"\d{309}")  # or another text
_MAX_DIMENSIONS = 64  # of an array, in NumPy and PyTorch


def cache_folder() -> Path:
    """Return mpillm's folder in the user's cache (XDG Base Directory Specification).

    Raises RuntimeError if the user has no home.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if Path(named).is_absolute() else Path.home() / ".cache") / "mpillm"


def check_files(folder: Path) -> None:
    """Raise ConfigError if a folder from elsewhere has a pipe or a device in it, or a link to one.

    To open or read one may block forever.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            check_file(Path(place, name))


def opened(path: str, flags: int) -> int:
    """Open a file to write as `open` does (its `opener`), but follow no link and wait for no pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _int(digits: str) -> int:
    value = int(digits)
    try:
        float(value)
    except OverflowError as error:
        raise ValueError(str(error)) from None
    return value


def read_json(path: Path, max_bytes: int = 1 << 28) -> Any:
    """Read a JSON file. Raises ConfigError naming the file, and the line of a mistake."""
    check_file(path)
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{excerpt(str(path))}: not a file's name") from None
    if data.startswith(LFS_POINTER):
        raise ConfigError(f"{path}: {lfs_hint(path.parent)}")
    if len(data) > max_bytes:
        raise ConfigError(f"{path}: more than {max_bytes} bytes of JSON")
    try:
        # An integer that no float can hold would fail in later arithmetic.
        return json.loads(data, parse_int=_int if _LONG_NUMBER.search(data) else None)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON: nested too deep") from None
    except ValueError:
        raise ConfigError(f"{path}: not valid JSON: a number of too many digits") from None


def lfs_hint(folder: Path) -> str:
    """Return what to do about Git LFS's pointer to a file of a folder."""
    return f"a Git LFS pointer, not the file; fetch it: `git -C {shlex.quote(str(folder))} lfs pull`"


def n_values(shape: Sequence[Any]) -> int:
    """Return the number of values of an array with this shape, from an untrusted file. Raises ValueError.

    With thousands of dimensions, or numbers of thousands of digits, the product alone would take minutes.
    """
    if len(shape) > _MAX_DIMENSIONS or any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape):
        raise ValueError("a shape that no array has")
    return math.prod(shape)


def path_exists(path: str | os.PathLike[str]) -> bool:
    """Return whether there is such a file or folder; False for an invalid name, where Path raises."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def excerpt(value: Any) -> str:
    """Return a value of a JSON file or body as a message shows it: 60 characters at most."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextlib.contextmanager
def panics_named(subject: str) -> Iterator[None]:
    """Raise ConfigError, which begins with `subject`, where the library `tokenizers` fails in the block.

    It raises plain Exception, and Rust's panic, which is not an Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{subject}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Do as `read_json`, for a file that must hold an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value


@contextlib.contextmanager
def as_written(path: Path, else_it_is: str = "damaged, or not written by a run") -> Iterator[None]:
    """Turn errors about missing or wrong entries of a JSON file into a ConfigError that names the file.

    `else_it_is`: what the file is if it has such errors.
    """
    try:
        yield
    except ConfigError:
        raise
    except DATA_ERRORS as error:
        raise ConfigError(f"{path}: {else_it_is}: {type(error).__name__} {str(error)[:200]}") from error


@contextlib.contextmanager
def naming(path: Path | None) -> Iterator[None]:
    """Add the name of the file to an OSError that names none: one of a write to an open file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(error.filename or path)) from error


@contextlib.contextmanager
def as_writable(path: Path) -> Iterator[None]:
    """Turn a failed write into a ConfigError that names the file, or `path` if the system names none."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or path} can't be written: {error.strerror}") from error


def write_json(path: Path, value: Any, *, waits: bool = True) -> None:
    """Do as `write_text`, for JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", waits=waits)


def write_text(path: Path, text: str, *, waits: bool = True) -> None:
    """Write `text`, with secrets masked, completely or not at all. Raises OSError, which names the file.

    `waits`: until it is on the disk; otherwise it outlives this process, but not the machine.

    Bytes of a file's name that are not UTF-8 (lone surrogates in Python) become escapes, which JSON can read.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        with (
            naming(path),
            open(temporary, "w", encoding="utf-8", errors="backslashreplace", opener=opened) as file,
        ):
            file.write(without_known(text))
            file.flush()
            if waits:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def replace_folder(
    source: Path, target: Path, aside: Path, is_done: Callable[[], bool] = lambda: False
) -> None:
    """Rename the folder `source` to `target`.

    An old `target` goes to `aside`, and comes back after any interruption, including a signal. All three are
    in one file system. `is_done`: whether another process has created `target` meanwhile; it then stays.
    Raises OSError if renaming failed.
    """
    if is_done():
        return
    try:
        with contextlib.suppress(FileNotFoundError):
            target.rename(aside)
        source.rename(target)
    except OSError:
        if not is_done():
            raise
    finally:
        if aside.exists() and not target.exists():
            aside.rename(target)
