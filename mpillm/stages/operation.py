"""Stages of the pipeline, and the runner that executes each completely or not at all.

An `Operation` writes one folder. It uses a temporary folder and renames it when all files exist, so a folder
with the final name is complete. A stamp in it records the inputs: while they are unchanged, the stage is
skipped. The log is `<folder>.log`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil

from disagg.errors import ConfigError
from launch.children import Children, tail
from launch.command import Command, NotHere
from launch.exits import how_ended
from mpillm.errors import StageError
from mpillm.files import replace_folder, write_json

STAMP = "mpillm-stamp.json"

_SMALL = 1 << 20  # bytes: a hash identifies a file up to this size; size and time identify a larger one


class Operation(ABC):
    """A stage that writes the folder `output` and reads the outputs of its `dependencies`."""

    name: ClassVar[str]
    # users may change its files: it is not repeated while they exist
    hand_edited: ClassVar[bool] = False

    output: Path
    dependencies: Sequence[Operation] = ()
    deadline_s: float | None = None

    @abstractmethod
    def inputs(self) -> dict[str, Any]:
        """Return the inputs other than dependencies, as values for JSON; files by `identity`."""

    @abstractmethod
    def files(self) -> Sequence[str]:
        """Return the files of a complete output, relative to it."""

    def missing(self, folder: Path) -> list[str]:
        """Return the files that are missing or empty in `folder`."""
        return [name for name in self.files() if not _has(folder / name)]

    @abstractmethod
    def commands(self, target: Path) -> Sequence[Command]:
        """Return the commands that write the output to the folder `target`; none if this process does."""

    def check(self) -> None:  # noqa: B027 (a stage may have no checks)
        """Raise ConfigError for problems that can be detected before the first stage."""

    def describe(self) -> list[str]:
        """Return the lines of `--dry_run`: the commands with the final output."""
        return [str(command) for command in self.commands(self.output)]

    def make(self, target: Path, children: Children, log: Path) -> None:
        """Write the folder `target`, which does not exist yet."""
        for command in self.commands(target):
            with log.open("a", encoding="utf-8") as file:
                file.write(f"$ {command}\n")
            child = children.start(self.name, command.argv, command.environment(), log)
            code = children.wait(child, self.deadline_s)
            if code is None:
                raise StageError(
                    f"{self.name}: not done within {self.deadline_s:g} s (--build_deadline); the end of"
                    f" {log}:\n{child.tail()}"
                )
            if code != 0:
                how = f"{command.argv[0]} {how_ended(code)}"
                raise StageError(f"{self.name}: {how}; the end of {log}:\n{child.tail()}")

    # --- state ---

    def digest(self) -> str:
        """Return a hash of all inputs."""
        state = {
            "operation": self.name,
            "inputs": self.inputs(),
            "dependencies": [d.digest() for d in self.dependencies],
        }
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

    def why(self) -> str:
        """Return the reason to execute the stage; empty if its output is complete and up to date."""
        stamp = read_stamp(self.output)
        if stamp is None:
            return "not there"
        if stamp["digest"] != self.digest():  # first, because another layout also has other files
            return _difference(stamp["inputs"], self.inputs()) or "its inputs have changed"
        if missing := self.missing(self.output):
            return f"{missing[0]} is missing"
        if not self.hand_edited:
            for name, size in stamp["files"].items():
                path = self.output / name
                if not path.is_file() or path.stat().st_size != size:
                    return f"{name} was changed after it was made"
        return ""


def execute(operations: Sequence[Operation], *, force: bool = False, dry_run: bool = False) -> None:
    """Execute `operations` and their dependencies, each once, dependencies first.

    An output that is up to date remains, unless `force`. All checks run before the first stage. Raises
    ConfigError or StageError if an output cannot be written; an earlier output then remains.
    """
    reasons = {op: ("--force" if force else op.why()) for op in _ordered(operations)}
    width = max((len(op.name) for op in reasons), default=0)
    _check_apart(list(reasons))
    lacking: dict[Operation, str] = {}
    for op, why in reasons.items():
        if why:
            try:
                op.check()
            except NotHere as error:
                if not dry_run:
                    raise
                lacking[op] = str(error)
            _check_place(op)
    if dry_run:
        for op, why in reasons.items():
            print(f"# {op.name}: {op.output}" + (f" ({why})" if why else " is up to date"))
            if op in lacking:
                print(f"# can't run here: {lacking[op]}")
            for line in op.describe() if why else ():
                print(line)
        return
    for op, why in reasons.items():
        if not why:
            print(f"  {op.name:<{width}}  {op.output} is up to date")
            continue
        print(f"  {op.name:<{width}}  {op.output} ({why}); log: {log_of(op.output)}")
        began = time.monotonic()
        _make(op)
        print(f"  {op.name:<{width}}  done in {time.monotonic() - began:.1f} s")


def log_of(output: Path) -> Path:
    """Return the path of a stage's log."""
    return output.with_name(output.name + ".log")


def _ordered(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations, each after its dependencies, without repetitions for the same output."""
    order: dict[tuple[Path, str], Operation] = {}

    def visit(op: Operation, above: tuple[Operation, ...]) -> None:
        if op in above:
            raise RuntimeError(f"{op.name} depends on itself")
        for dependency in op.dependencies:
            visit(dependency, (*above, op))
        # The digest reads the flags and raises ConfigError for wrong ones.
        order.setdefault((op.output.resolve(), op.digest()), op)

    for op in operations:
        visit(op, ())
    return list(order.values())


def _make(op: Operation) -> None:
    parent, log = op.output.parent, log_of(op.output)
    work = parent / f".{op.output.name}.{socket.gethostname()}-{os.getpid()}.partial"
    target, earlier = work / "made", work / "before"
    with _disk_errors(op):
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(op.output)
        try:
            with Children() as children:
                work.mkdir()
                log.write_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {op.name}\n", encoding="utf-8")
                # Read the inputs before the stage, because they may change during it.
                state = {"digest": op.digest(), "inputs": op.inputs()}
                op.make(target, children, log)
                if missing := op.missing(target):
                    raise StageError(
                        f"{op.name}: did not write {', '.join(missing)}; the end of {log}:\n{tail(log, 15)}"
                    )
                write_json(target / STAMP, _stamp(op, target, state))
                replace_folder(target, op.output, earlier)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _stamp(op: Operation, target: Path, state: dict[str, Any]) -> dict[str, Any]:
    return {
        "operation": op.name,
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        **state,
        "commands": [str(command) for command in op.commands(op.output)],
        "files": {
            str(p.relative_to(target)): p.stat().st_size for p in sorted(target.rglob("*")) if p.is_file()
        },
    }


@contextlib.contextmanager
def _disk_errors(op: Operation) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StageError(
            f"{op.name}: can't write {error.filename or op.output}: {error.strerror or error}"
        ) from error


def _sweep(output: Path) -> None:
    """Remove the temporary folders of this output's killed builds on this host."""
    host = re.escape(socket.gethostname())
    for leftover in output.parent.glob(f".{output.name}.*.partial"):
        match = re.fullmatch(rf"{host}-(\d+)\.partial", leftover.name.removeprefix(f".{output.name}."))
        if match and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(leftover, ignore_errors=True)


def _check_apart(operations: Sequence[Operation]) -> None:
    """Check that no output is in another output's folder: writing one would remove the other."""
    for i, op in enumerate(operations):
        for other in operations[:i]:
            a, b = op.output.resolve(), other.output.resolve()
            if a.is_relative_to(b) or b.is_relative_to(a):
                raise ConfigError(
                    f"{op.name} would write to {op.output}, {other.name} to {other.output}: give each its"
                    " own folder, and run one command for each workload and scenario"
                )


def _check_place(op: Operation) -> None:
    """Raise ConfigError if the output exists and mpillm did not create it, or if it cannot be written."""
    output = op.output
    try:
        if output.exists() and (
            not output.is_dir() or (any(output.iterdir()) and read_stamp(output) is None)
        ):
            raise ConfigError(
                f"{op.name}: {output} exists and was not made by mpillm; move it away or choose"
                " another folder"
            )
        above = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    except OSError as error:
        raise ConfigError(f"{op.name}: can't look into {output}: {error.strerror}") from error
    folder = above.parent if above == output.absolute() else above
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{op.name}: can't write {output}: {folder} is not a writable folder")


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """Return the stamp in a stage's output; None for any other folder."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        return stamp if {"digest", "inputs", "files"} <= stamp.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def identity(path: Path) -> Any:
    """Return a stamp's digest, hashes of small files, or sizes and times of large files."""
    if stamp := read_stamp(path):
        return stamp["digest"]
    if path.is_dir():
        # Git, editors and download tools write files with a leading dot. A log belongs to a stage whose
        # output is in this folder.
        files = (
            p
            for p in sorted(path.iterdir())
            if p.is_file() and not p.name.startswith(".") and p.suffix != ".log"
        )
        return {str(p.relative_to(path)): identity(p) for p in files}
    if not path.exists():
        return None
    stat = path.stat()
    if stat.st_size <= _SMALL:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return [stat.st_size, stat.st_mtime_ns]


def _has(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> str:
    """Return the first changed input, with both values if they are short."""
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            return _difference(before, after, f"{prefix}{key}.")
        values = f": {before!r} -> {after!r}"
        return f"{prefix}{key} has changed" + (values if len(values) <= 80 else "")
    return ""
