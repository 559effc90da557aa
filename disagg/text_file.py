"""Text files from users: configurations, settings."""

from __future__ import annotations

import os
import stat

from .errors import ConfigError

_MAX_BYTES = 1 << 20  # ten times the file of a large cluster; PyYAML needs 20 s for this size


def check_file(path: str | os.PathLike[str], where: str = "") -> None:
    """Raise ConfigError if a path is a pipe or a device, or a link to one, because reading may never end.

    `where`: replaces the path in the error.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 (see below)
    except (OSError, ValueError):  # the caller's open() reports the reason
        return
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise ConfigError(f"{where or os.fspath(path)}: neither a file nor a folder")


def read_text(path: str, option: str = "") -> str:
    """Return the text of a file, without a byte order mark. `option`: precedes the file's name in errors.

    Raises ConfigError if the file cannot be read, is not UTF-8, or has more than 1 MiB.
    """
    where = f"{option}{path}"
    check_file(path, where)
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (every rank imports this; pathlib is slow to import)
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{where}: more than {_MAX_BYTES} bytes, which is not a configuration")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not a text file: byte {error.start} ({content[error.start]:#04x}) is not UTF-8"
        ) from error
