"""Text files that somebody hands over: configurations, settings."""

from __future__ import annotations

import os
import stat

from .errors import ConfigError

_MOST = 1 << 20  # bytes; those of large clusters have a tenth of it, and PyYAML takes 20 s for so much


def check_file(path: str | os.PathLike[str], where: str = "") -> None:
    """Raise ConfigError if a path is a pipe or a device, or a link to one: reading may never end.

    `where`: stands for the path in the error.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 (see below)
    except (OSError, ValueError):  # whoever opens it says why
        return
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise ConfigError(f"{where or os.fspath(path)}: neither a file nor a folder")


def read_text(path: str, option: str = "") -> str:
    """Return the text of a file, without a byte order mark. `option`: stands before its name in errors.

    Raises ConfigError if it can't be read, is not UTF-8, or has more than a MiB.
    """
    where = f"{option}{path}"
    check_file(path, where)
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (every rank imports this; pathlib is slow to import)
            content = file.read(_MOST + 1)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    if len(content) > _MOST:
        raise ConfigError(f"{where}: more than {_MOST} bytes, which is no configuration")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not a text file: byte {error.start} ({content[error.start]:#04x}) is not UTF-8"
        ) from error
