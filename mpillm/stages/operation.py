"""Stages of the pipeline: what each needs, what it makes, and the runner that makes it whole or not at all.

An `Operation` makes one folder. It is made beside its place, under a name of its own, and renamed when all
its files are there; so a folder in its place is complete, whatever was interrupted. A stamp in it says what
it was made from: as long as that is the same, the stage is skipped. What was said on the way is kept in
`<folder>.log`.
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
from mpillm.files import replace_folder

STAMP = "mpillm-stamp.json"

_SMALL = 1 << 20  # bytes: a file up to this size is known by its content, a larger one by its size and time


class Operation(ABC):
    """One stage.

    `output` is the folder that it makes, `dependencies` are the stages whose outputs it reads.
    """

    name: ClassVar[str]
    # people may change its files: it is not remade while they exist
    hand_edited: ClassVar[bool] = False

    output: Path
    dependencies: Sequence[Operation] = ()
    deadline_s: float | None = None

    @abstractmethod
    def inputs(self) -> dict[str, Any]:
        """Return what the output depends on besides dependencies: values for JSON; files by `identity`."""

    @abstractmethod
    def files(self) -> Sequence[str]:
        """Return the files that make the output complete, relative to it."""

    def missing(self, folder: Path) -> list[str]:
        """Return the files that `folder` lacks, or has empty."""
        return [name for name in self.files() if not _has(folder / name)]

    @abstractmethod
    def commands(self, target: Path) -> Sequence[Command]:
        """Return the commands that make the output in the folder `target`; none if this process makes it."""

    def check(self) -> None:  # noqa: B027 (nothing may be known)
        """Raise ConfigError for what is known to be wrong before anything is made."""

    def describe(self) -> list[str]:
        """Return what `--dry_run` prints: the commands, with the output in its place."""
        return [str(command) for command in self.commands(self.output)]

    def make(self, target: Path, children: Children, log: Path) -> None:
        """Make the folder `target`, which does not exist yet."""
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
        """Return a hash of everything that the output depends on."""
        state = {
            "operation": self.name,
            "inputs": self.inputs(),
            "dependencies": [d.digest() for d in self.dependencies],
        }
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

    def why(self) -> str:
        """Return why it must be made; empty if the output exists, complete, and made from the same inputs."""
        stamp = read_stamp(self.output)
        if stamp is None:
            return "not there"
        if stamp["digest"] != self.digest():  # first: another layout has other files, too
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
    """Make the outputs of `operations` and of what they depend on, each once, dependencies first.

    An output that is up to date is kept, unless `force`. All that will be made is checked before the first is
    made. ConfigError or StageError when an output cannot be made: then it is not there, or is the one that
    was there before.
    """
    wanted = {op: ("--force" if force else op.why()) for op in _ordered(operations)}
    width = max((len(op.name) for op in wanted), default=0)
    _check_apart(list(wanted))
    lacking: dict[Operation, str] = {}
    for op, why in wanted.items():
        if why:
            try:
                op.check()
            except NotHere as error:
                if not dry_run:
                    raise
                lacking[op] = str(error)
            _check_place(op)
    if dry_run:
        for op, why in wanted.items():
            print(f"# {op.name}: {op.output}" + (f" ({why})" if why else " is up to date"))
            if op in lacking:
                print(f"# can't run here: {lacking[op]}")
            for line in op.describe() if why else ():
                print(line)
        return
    for op, why in wanted.items():
        if not why:
            print(f"  {op.name:<{width}}  {op.output} is up to date")
            continue
        print(f"  {op.name:<{width}}  {op.output} ({why}); log: {log_of(op.output)}")
        began = time.monotonic()
        _make(op)
        print(f"  {op.name:<{width}}  done in {time.monotonic() - began:.1f} s")


def log_of(output: Path) -> Path:
    """Return where the log of a stage is kept."""
    return output.with_name(output.name + ".log")


def _ordered(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations, each after its dependencies, without repetitions for the same place."""
    order: dict[tuple[Path, str], Operation] = {}

    def visit(op: Operation, above: tuple[Operation, ...]) -> None:
        if op in above:
            raise RuntimeError(f"{op.name} depends on itself")
        for dependency in op.dependencies:
            visit(dependency, (*above, op))
        # the digest reads flags: wrong ones are found here
        order.setdefault((op.output.resolve(), op.digest()), op)

    for op in operations:
        visit(op, ())
    return list(order.values())


def _make(op: Operation) -> None:
    parent, log = op.output.parent, log_of(op.output)
    work = parent / f".{op.output.name}.{socket.gethostname()}-{os.getpid()}.partial"
    made, before = work / "made", work / "before"
    with _disk_errors(op):
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(op.output)
        try:
            with Children() as children:
                work.mkdir()
                log.write_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {op.name}\n", encoding="utf-8")
                # Before: an input that changes meanwhile is not what the output was made from.
                state = {"digest": op.digest(), "inputs": op.inputs()}
                op.make(made, children, log)
                if missing := op.missing(made):
                    raise StageError(
                        f"{op.name}: did not write {', '.join(missing)}; the end of {log}:\n{tail(log, 15)}"
                    )
                (made / STAMP).write_text(
                    json.dumps(_stamp(op, made, state), indent=2) + "\n", encoding="utf-8"
                )
                replace_folder(made, op.output, before)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _stamp(op: Operation, made: Path, state: dict[str, Any]) -> dict[str, Any]:
    return {
        "operation": op.name,
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        **state,
        "commands": [str(command) for command in op.commands(op.output)],
        "files": {str(p.relative_to(made)): p.stat().st_size for p in sorted(made.rglob("*")) if p.is_file()},
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
    """Remove what killed builds of this output left beside it, on this host."""
    host = re.escape(socket.gethostname())
    for leftover in output.parent.glob(f".{output.name}.*.partial"):
        match = re.fullmatch(rf"{host}-(\d+)\.partial", leftover.name.removeprefix(f".{output.name}."))
        if match and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(leftover, ignore_errors=True)


def _check_apart(operations: Sequence[Operation]) -> None:
    """Check that no output is, or lies in, another's folder: making one would remove the other."""
    for i, op in enumerate(operations):
        for other in operations[:i]:
            a, b = op.output.resolve(), other.output.resolve()
            if a.is_relative_to(b) or b.is_relative_to(a):
                raise ConfigError(
                    f"{op.name} would write to {op.output}, {other.name} to {other.output}: give each its"
                    " own folder, and run one command for each workload and scenario"
                )


def _check_place(op: Operation) -> None:
    """Check the output's place.

    Raises ConfigError if something is there that mpillm did not make, or it can't be written.
    """
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
    """Return the stamp in a folder that a stage has made; None for any other folder."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        return stamp if {"digest", "inputs", "files"} <= stamp.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def identity(path: Path) -> Any:
    """Identify a file or folder: a stamp's digest, hashes of small files, sizes and times of large ones."""
    if stamp := read_stamp(path):
        return stamp["digest"]
    if path.is_dir():
        # what git, an editor or a download tool keeps there begins with a dot; a log is that of a stage whose
        # output lies in there
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
    """Return the first input that has changed, with both values if they are short."""
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            return _difference(before, after, f"{prefix}{key}.")
        values = f": {before!r} -> {after!r}"
        return f"{prefix}{key} has changed" + (values if len(values) <= 80 else "")
    return ""
