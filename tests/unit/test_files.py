"""A folder is replaced whole, or stays as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.data.tokenizer import load_tokenizer
from mpillm.engine.shape.read_config import load_model_config
from mpillm.files import check_files, read_json, replace_folder, write_text
from mpillm.report.run_files import RunFiles
from mpillm.submission.judged_run import JudgedRun
from mpillm.triton.peft_adapter import convert
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.run_directories import make_run


class Folders:
    """Names what was made, its place, and where the folder before it goes."""

    def __init__(self, folder: Path) -> None:
        self.made, self.target, self.aside = folder / ".made", folder / "target", folder / ".aside"
        put(self.made, "new")

    def holds(self) -> dict[str, str]:
        return {
            path.name: (path / "text").read_text()
            for path in (self.made, self.target, self.aside)
            if path.exists()
        }


def put(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "text").write_text(text)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def test_the_first(folders: Folders) -> None:
    replace_folder(folders.made, folders.target, folders.aside)
    assert folders.holds() == {"target": "new"}


def test_in_place_of_another(folders: Folders) -> None:
    put(folders.target, "old")
    replace_folder(folders.made, folders.target, folders.aside)
    assert folders.holds() == {"target": "new", ".aside": "old"}


def test_what_was_there_comes_back(folders: Folders) -> None:
    put(folders.target, "old")
    with pytest.raises(FileNotFoundError):
        replace_folder(folders.made.with_name("nothing"), folders.target, folders.aside)
    assert folders.holds() == {"target": "old", ".made": "new"}


def test_another_process_was_faster(folders: Folders) -> None:
    put(folders.target, "theirs")
    replace_folder(folders.made, folders.target, folders.aside, lambda: True)
    assert folders.holds() == {"target": "theirs", ".made": "new"}


@pytest.mark.parametrize("whole", [True, False])
def test_another_process_makes_it_in_between(folders: Folders, whole: bool) -> None:
    calls: list[bool] = []

    def is_done() -> bool:
        calls.append(True)
        return whole and len(calls) > 1

    put(folders.target, "damaged")
    rename = folders.made.rename

    class Made(type(folders.made)):  # type: ignore[misc]
        def rename(self, target: Path) -> Path:
            put(folders.target, "theirs")
            return rename(target)

    if whole:
        replace_folder(Made(folders.made), folders.target, folders.aside, is_done)
    else:
        with pytest.raises(OSError, match="not empty"):
            replace_folder(Made(folders.made), folders.target, folders.aside, is_done)
    assert folders.holds() == {"target": "theirs", ".made": "new", ".aside": "damaged"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n]", ":2: not valid JSON: "),
        ("[" * 100_000, ": not valid JSON: nested too deep"),
        ("9" * 5000, ": not valid JSON: a number of too many digits"),
    ],
)
def test_invalid_json_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    (file := tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_json(file)
    assert str(error.value).startswith(f"{file}{message}")
    with pytest.raises(ConfigError, match="not a file's name"):
        read_json(tmp_path / "a\0b")


def test_a_pipe_or_a_device_in_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "inner", "whole")
    (tmp_path / "to nothing").symlink_to("nowhere")
    (tmp_path / "to a file").symlink_to("inner/text")
    check_files(tmp_path)
    os.mkfifo(tmp_path / "inner" / "pipe")
    with pytest.raises(ConfigError, match="inner/pipe: neither a file nor a folder"):
        check_files(tmp_path)


@pytest.mark.parametrize(
    "read",
    [
        *(load_tokenizer, RunFiles.read, JudgedRun.read),
        lambda folder: load_model_config(str(folder)),
        lambda folder: convert(folder, "float16"),
    ],
)
def test_readers_of_folders_open_no_device(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    """A link to /dev/zero has no end, and nobody writes to a pipe."""
    run = make_run(tmp_path / "run")
    for name in ("timeline.jsonl", "chat_template.jinja"):
        (run / name).symlink_to("/dev/null")
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        read(run)


def test_what_is_written_whole_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    """A directory of another user may have one where the first part is written."""
    (tmp_path / "other").write_text("mine")
    (tmp_path / "page.html.part").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=r"page\.html\.part"):
        write_text(tmp_path / "page.html", "theirs")
    assert (tmp_path / "other").read_text() == "mine"
    os.mkfifo(tmp_path / "result.json.part")
    with pytest.raises(OSError, match=r"result\.json\.part"):
        write_text(tmp_path / "result.json", "{}")
    write_text(tmp_path / "page.html", "again")
    assert (tmp_path / "page.html").read_text() == "again"


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """The system names no file where a write fails, so a run on a full disk ended in a traceback."""
    with files_of_at_most(1), pytest.raises(OSError, match="File too large") as raised:
        write_text(tmp_path / "result.json", "{}")
    assert raised.value.filename == str(tmp_path / "result.json")
    assert not [*tmp_path.iterdir()]
