"""Stages are made whole or not at all, once, in order."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from launch.command import Command
from mpillm.errors import StageError
from mpillm.stages.operation import STAMP, Operation, execute, identity, log_of

WRITES = (
    "import sys, pathlib; t = pathlib.Path(sys.argv[1]); t.mkdir(); (t / 'out').write_text(sys.argv[2]);"
    " print('wrote', sys.argv[2])"
)


class Stage(Operation):
    """Writes one file, by a command."""

    def __init__(
        self,
        output: Path,
        text: str,
        program: str = WRITES,
        dependencies: Sequence[Operation] = (),
        name: str = "stage",
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.output, self.text, self.program, self.dependencies = output, text, program, dependencies

    def inputs(self) -> dict[str, Any]:
        return {"text": self.text}

    def files(self) -> Sequence[str]:
        return ("out",)

    def commands(self, target: Path) -> Sequence[Command]:
        return (Command((sys.executable, "-c", self.program, str(target), self.text)),)


def lines_of(*operations: Operation, **options: bool) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        execute(operations, **options)
    return out.getvalue().splitlines()


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_made_once_and_again_when_an_input_changes(tmp_path: Path) -> None:
    out = tmp_path / "made"
    assert "(not there)" in lines_of(Stage(out, "a"))[0]
    first = (out / "out").stat().st_mtime_ns
    assert lines_of(Stage(out, "a")) == [f"  stage  {out} is up to date"]
    assert (out / "out").stat().st_mtime_ns == first
    assert "(text has changed: 'a' -> 'b')" in lines_of(Stage(out, "b"))[0]
    assert (out / "out").read_text() == "b"
    assert "(--force)" in lines_of(Stage(out, "b"), force=True)[0]
    assert "wrote b" in log_of(out).read_text()
    assert leftovers(tmp_path) == ["made", "made.log"]
    assert json.loads((out / STAMP).read_text())["files"] == {"out": 1}


def test_a_damaged_output_is_made_again(tmp_path: Path) -> None:
    out = tmp_path / "made"
    lines_of(Stage(out, "text"))
    (out / "out").write_text("te")
    assert "(out was changed after it was made)" in lines_of(Stage(out, "text"))[0]
    (out / "out").unlink()
    assert "(out is missing)" in lines_of(Stage(out, "text"))[0]
    (out / "out").write_text("")
    assert "(out is missing)" in lines_of(Stage(out, "text"))[0]
    (out / "out").unlink()
    assert "(text has changed: 'text' -> 'other')" in lines_of(Stage(out, "other"))[0]


def test_an_input_that_changes_while_the_output_is_made(tmp_path: Path) -> None:
    """The output was made from what was there at first, so it is not up to date."""

    class Changes(Stage):
        def commands(self, target: Path) -> Sequence[Command]:
            commands = super().commands(target)
            self.text = "new"
            return commands

    out = tmp_path / "made"
    lines_of(Changes(out, "old"))
    assert (out / "out").read_text() == "old"
    assert "(text has changed: 'old' -> 'new')" in lines_of(Stage(out, "new"))[0]


def test_an_empty_file_among_the_outputs(tmp_path: Path) -> None:
    """Only those that `files` names must have something in them."""
    out = tmp_path / "made"
    program = f"{WRITES}; (t / 'empty').touch()"
    lines_of(Stage(out, "a", program))
    assert lines_of(Stage(out, "a", program)) == [f"  stage  {out} is up to date"]


def test_hand_edited_files_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "made"
    stage = Stage(out, "text")
    stage.hand_edited = True  # type: ignore[misc]
    lines_of(stage)
    (out / "out").write_text("mine")
    assert lines_of(stage) == [f"  stage  {out} is up to date"]


def test_dependencies_first_each_once_and_a_change_travels(tmp_path: Path) -> None:
    def both(text: str) -> tuple[Stage, Stage]:
        one = Stage(tmp_path / "one", text, name="one")
        return Stage(tmp_path / "two", "2", dependencies=[one], name="two"), Stage(
            tmp_path / "three", "3", dependencies=[one], name="three"
        )

    names = [line.split()[0] for line in lines_of(*both("1")) if "not there" in line]
    assert names == ["one", "two", "three"]
    assert all("up to date" in line for line in lines_of(*both("1")))
    assert [line.split()[0] for line in lines_of(*both("x")) if "changed" in line] == ["one", "two", "three"]


def test_what_two_stages_need_is_made_once_and_is_one_thing(tmp_path: Path) -> None:
    def over(name: str, text: str) -> Stage:
        return Stage(
            tmp_path / name, name, dependencies=[Stage(tmp_path / "one", text, name="one")], name=name
        )

    made = [
        line.split()[0]
        for line in lines_of(over("two", "1"), over("three", "1"), over("two", "1"))
        if "not there" in line
    ]
    assert made == ["one", "two", "three"]
    with pytest.raises(
        ConfigError, match=r"one would write to .*one, one to .*one: give each its own folder"
    ):
        lines_of(over("two", "1"), over("three", "2"))


def test_no_success_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(
        StageError, match=r"stage: did not write out; the end of .*made.log:\n(.*\n)*  \| all is well"
    ):
        lines_of(Stage(tmp_path / "made", "", "import sys, os; os.mkdir(sys.argv[1]); print('all is well')"))
    assert leftovers(tmp_path) == ["made.log"]


def test_a_failed_tool_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "made"
    lines_of(Stage(out, "good"))
    with pytest.raises(
        StageError, match=r"stage: .* ended with exit code 1; the end of(.*\n)*.*ZeroDivisionError"
    ):
        lines_of(Stage(out, "bad", WRITES + "; 1 / 0"))
    assert (out / "out").read_text() == "good"
    assert leftovers(tmp_path) == ["made", "made.log"]


def test_what_was_there_comes_back_if_the_new_output_can_not_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "made"
    lines_of(Stage(out, "good"))
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name == "made" and path != out:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(StageError, match="Input/output error"):
        lines_of(Stage(out, "better"))
    assert (out / "out").read_text() == "good"
    assert leftovers(tmp_path) == ["made", "made.log"]


def test_a_deadline(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "made", "", "import time; time.sleep(60)")
    stage.deadline_s = 0.3
    with pytest.raises(StageError, match=r"not done within 0\.3 s"):
        lines_of(stage)
    assert leftovers(tmp_path) == ["made.log"]


def test_dry_run_prints_and_does_nothing(tmp_path: Path) -> None:
    lines = lines_of(Stage(tmp_path / "made", "it's"), dry_run=True)
    assert leftovers(tmp_path) == []
    subprocess.run(["sh", "-c", lines[1]], check=True)  # copy, paste
    assert (tmp_path / "made" / "out").read_text() == "it's"


@pytest.mark.parametrize(("first", "second"), [("a", "a"), ("a", "b/../a"), ("a", "a/b"), ("a/b", "a")])
def test_two_outputs_in_one_folder(tmp_path: Path, first: str, second: str) -> None:
    below = Stage(tmp_path / first, "a", name="quantize")
    with pytest.raises(
        ConfigError, match=r"^build would write to .*, quantize to .*: give each its own folder"
    ):
        lines_of(Stage(tmp_path / second, "b", dependencies=[below], name="build"))
    assert not leftovers(tmp_path)


def test_somebody_elses_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "thesis.txt").write_text("all of it")
    with pytest.raises(ConfigError, match="exists and was not made by mpillm"):
        lines_of(Stage(tmp_path / "made", "a"), force=True)
    assert leftovers(tmp_path / "made") == ["thesis.txt"]


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is not a writable folder"):
        lines_of(Stage(tmp_path / "file" / "made", "a"))
    # root is told that it may, until it tries
    with pytest.raises((ConfigError, StageError), match="can't write /proc"):
        lines_of(Stage(Path("/proc/made"), "a"))


def test_checked_before_anything_is_made(tmp_path: Path) -> None:
    class Wrong(Stage):
        def check(self) -> None:
            raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong"):
        lines_of(Stage(tmp_path / "one", "a"), Wrong(tmp_path / "two", "b"))
    assert leftovers(tmp_path) == []


BUILD = """
import resource, sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from test_builder_operation import WRITES, Stage, lines_of
from mpillm.errors import StageError
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    lines_of(Stage(Path({out!r}), {text!r}, {program!r}))
except StageError as error:
    sys.exit(str(error))
"""


def child(out: Path, text: str, program: str, limit: int = 0) -> subprocess.Popen[str]:
    source = BUILD.format(
        folder=str(Path(__file__).parent), out=str(out), text=text, program=program, limit=limit
    )
    return subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_build_leaves_no_half_output(tmp_path: Path, number: int) -> None:
    out = tmp_path / "made"
    process = child(out, "a", WRITES + "; import time; time.sleep(60)")
    end = time.monotonic() + 30
    while not list(tmp_path.glob(".made.*/made/out")):
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.communicate(timeout=300)
    assert not out.exists()
    if number == signal.SIGKILL:  # nobody could tidy up: the next build does
        lines_of(Stage(out, "a"))
        assert leftovers(tmp_path) == ["made", "made.log"]
    else:
        assert leftovers(tmp_path) == ["made.log"]


def test_a_full_disk(tmp_path: Path) -> None:
    out = tmp_path / "made"
    # A file may not be larger, as on a disk that is full: the tool finds that out, or this process.
    for text, program, message in (
        ("a", WRITES.replace("sys.argv[2])", "'x' * 20000)", 1), "File too large"),
        ("x" * 20_000, WRITES, "can't write"),
    ):
        process = child(out, text, program, limit=10_000)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "stage: " in err and message in err
        assert leftovers(tmp_path) == ["made.log"]


def test_identity(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "big").write_bytes(b"x" * (2 << 20))
    first = identity(tmp_path)
    assert first == identity(tmp_path)
    os.utime(tmp_path / "config.json", ns=(1, 1))
    assert first == identity(tmp_path)  # a small file is its content
    (tmp_path / "engine.log").write_text("of a stage whose output is in this folder")
    assert first == identity(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert first != identity(tmp_path)
    second = identity(tmp_path)
    (tmp_path / "big").write_bytes(b"x" * (3 << 20))
    assert second != identity(tmp_path)
    assert identity(tmp_path / "nothing") is None
