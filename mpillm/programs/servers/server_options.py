"""Options that the installed release of a server knows.

They are read from the source of its parser, which takes a fraction of a second. Its `--help` imports PyTorch,
which takes 10 s and more, and fails on a machine without the driver.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from disagg.errors import nearest
from launch.command import NotHere, find_program
from launch.environment import clean_environment

_FIND_S = 20.0  # for a Python on a slow file system to find a package
_SEARCH_S = 30.0  # for a search in all source files
_MAX_FILE = 4 << 20  # bytes that are read of a source file
_FIND = (
    "import importlib.util as u, sys; sys.path[:] = filter(None, sys.path);"
    " print(u.find_spec(sys.argv[1]).submodule_search_locations[0])"
)
# A script's first lines: of an installer, and of one that has a long or blank path to name.
_PYTHON = re.compile(rb"\A#!(?:/bin/sh\n'''exec' *)?\"?(?:/usr/bin/env +)?([^\s\"]*python[\d.]*)\"?[\s\"]")
_VERSION = re.compile(r"^__version__\b[^\n'\"]*['\"]([\w.+!-]{1,80})['\"]", re.M)
_OPTION = re.compile(rb"['\"](--[A-Za-z][\w-]*)['\"=]")
_FIELD = re.compile(rb"^[ \t]+(\w+)[ \t]*:", re.M)  # whose name is an option's


@dataclass(frozen=True)
class OptionSource:
    """Where a package defines the options of its server, and which have changed."""

    package: str
    files: tuple[str, ...]  # patterns, in the package
    # Fewer names mean that the release defines its options in other files; vLLM has 340, SGLang 550.
    min_names: int = 200
    is_flexible: bool = False  # its parser takes --max_num_seqs, and --no-, --enable- or --disable- of a name
    # By release, from its source: the old name, and the new one ("": none).
    removed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    deprecated: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def advice(self, name: str) -> str:
        """Return the advice for a name that some release has removed; "" for other names."""
        return next((advice_on(names[name]) for names in self.removed.values() if name in names), "")


def advice_on(new_name: str) -> str:
    """Return what to do about an old name."""
    return f"use {new_name}" if new_name else "leave it out"


@dataclass(frozen=True)
class Release:
    """The installed release of a server."""

    source: OptionSource
    version: str = ""  # "": unknown
    folder: Path = Path()  # of the package
    unreadable: str = ""  # why its options are unknown

    def __str__(self) -> str:
        return f"{self.source.package} {self.version}".rstrip()

    @cached_property
    def names(self) -> frozenset[str]:
        """Names that the parser's source contains: all options, and more."""
        names: set[bytes] = set()
        for pattern in self.source.files:
            for path in self.folder.glob(pattern):
                text = _read(path)
                names.update(_OPTION.findall(text))
                names.update(b"--" + name.replace(b"_", b"-") for name in _FIELD.findall(text))
        return frozenset(name.decode() for name in names)

    def has(self, name: str) -> bool:
        """Return whether the release surely has an option."""
        return not self.unreadable and name in self.names and name not in self.removed

    @cached_property
    def removed(self) -> Mapping[str, str]:
        """The removed options, with their new names."""
        return self._until_now(self.source.removed)

    @cached_property
    def deprecated(self) -> Mapping[str, str]:
        """The deprecated options, with their new names."""
        return self._until_now(self.source.deprecated)

    def _until_now(self, changes: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
        own = _number(self.version) if self.version else ()
        return {
            name: to
            for release, names in changes.items()
            if _number(release) <= own
            for name, to in names.items()
        }

    def options(self, args: Iterable[str]) -> list[str]:
        """Return the long options among arguments, without values and keys, in the parser's spelling."""
        names = (re.split(r"[=.]", arg, maxsplit=1)[0] for arg in args if arg.startswith("--"))
        return [*dict.fromkeys(name.replace("_", "-") if self.source.is_flexible else name for name in names)]

    def unknown(self, args: Iterable[str]) -> list[str]:
        """Return the options among arguments that the release surely does not have."""
        missing = [name for name in self.options(args) if name in self.removed or not self._defines(name)]
        elsewhere = self._quoted_elsewhere([name for name in missing if name not in self.removed])
        return [name for name in missing if name not in elsewhere]

    def _defines(self, name: str) -> bool:
        # A parser takes the beginning of a name for the name.
        return any(known.startswith(other) for other in self._spellings(name) for known in self.names)

    def _spellings(self, name: str) -> Sequence[str]:
        bare = name.removeprefix("--").removeprefix("no-")
        if not self.source.is_flexible:
            return (name, f"--{bare}")  # SGLang's parser has --no- of some switches
        swapped = {"enable": f"--disable-{bare[7:]}", "disable": f"--enable-{bare[8:]}"}
        return (
            name,
            f"--{bare}",
            *(other for start, other in swapped.items() if bare.startswith(f"{start}-")),
        )

    def _quoted_elsewhere(self, names: Sequence[str]) -> set[str]:
        """Return the names that any file of the package quotes; all of them if the search is slow."""
        quoted = {
            name: tuple(f"{quote}{other}".encode() for other in self._spellings(name) for quote in "'\"")
            for name in names
        }
        matches: set[str] = set()
        end = time.monotonic() + _SEARCH_S
        for path in self.folder.rglob("*.py") if names else ():
            text = _read(path)
            matches.update(name for name, texts in quoted.items() if any(one in text for one in texts))
            if time.monotonic() > end:
                return set(names)
        return matches

    def why_unknown(self, name: str) -> str:
        """Return a message about an option that the release does not have, with any known new name."""
        advice = self.source.advice(name)
        return f"{self} has no {name}" + (f"; {advice}" if advice else nearest(name, self.names, 0.75))


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(digits[:9]) for digits in re.findall(r"\d+", version)[:3])


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE)
    except OSError:
        return b""


_releases: dict[str, Release] = {}


def installed_release(program: str, source: OptionSource) -> Release | None:
    """Return the release whose program a run would start; None if this machine has none."""
    try:
        path = find_program(program, "", typed=True)
    except NotHere:
        return None
    if path not in _releases:
        _releases[path] = _release(path, source)
    return _releases[path]


def _release(program: str, source: OptionSource) -> Release:
    folder = _package_folder(program, source.package)
    if isinstance(folder, str):
        return Release(source, unreadable=folder)
    texts = (_read(folder / name).decode(errors="replace") for name in ("_version.py", "version.py"))
    version = next((match[1] for text in texts if (match := _VERSION.search(text))), "")
    release = Release(source, version, folder)
    if len(release.names) >= source.min_names:
        return release
    return Release(source, version, folder, f"{folder} does not define them where mpillm looks")


def python_of(program: str) -> str | None:
    """Return the Python that runs a script; None if the program is not a Python script."""
    if (match := _PYTHON.match(_read(Path(program)))) is None:
        return None
    python = os.fsdecode(match[1])
    return shutil.which(python, path=clean_environment(os.environ).get("PATH")) or python


def _package_folder(program: str, package: str) -> Path | str:
    """Return the folder of a package that a script's Python imports, or why it is unknown."""
    import subprocess  # few runs start servers

    if (python := python_of(program)) is None:
        return f"{program} is not a Python script"
    environment = clean_environment(os.environ)
    try:
        done = subprocess.run(
            [python, "-c", _FIND, package], env=environment, capture_output=True, timeout=_FIND_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python}: {error}"
    folder = Path(os.fsdecode(done.stdout.rstrip(b"\n").rpartition(b"\n")[2]))
    if done.returncode or not folder.is_absolute():
        return f"{python} finds no package {package}"
    return folder
