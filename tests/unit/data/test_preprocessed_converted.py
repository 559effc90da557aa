"""Conversions of data frames: made once, never from another state of the file, never in a run's way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.data_loader import Samples
from mpillm.data.preprocessed import converted
from mpillm.data.preprocessed.frames import Frame, read_frame
from mpillm.data.preprocessed.loader import PreprocessedLoader
from mpillm.workloads.workload import Columns
from tests.helpers.data_frames import write_frame
from tests.helpers.full_disk import files_of_at_most

ROWS = [list(range(300, 900 + i)) for i in range(800)]
STOPS = [[2], [13, 40, 13]] * 400
COLUMNS = Columns("tok_input", "tok_input_len", "tok_stop_sequence", ("gt_output", "metric"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def frame(tmp_path: Path) -> Path:
    return write(tmp_path / "set" / "set.pkl")


def write(file: Path, **change: Any) -> Path:
    columns: dict[str, Any] = {
        "tok_input": ROWS,
        "tok_input_len": np.array([len(row) for row in ROWS]),
        "tok_stop_sequence": STOPS,
        "gt_output": [f"antwoord {i} één \udc80" for i in range(800)],
        "metric": [""] * 800,
    } | change
    file.parent.mkdir(exist_ok=True)
    write_frame(file, {name: values for name, values in columns.items() if values is not None})
    return file


def load(file: Path) -> Samples:
    return PreprocessedLoader(file, COLUMNS).load()


class Reads(list[Path]):
    """The data frames that were read."""

    def read(self, file: Path) -> Frame:
        self.append(file)
        return read_frame(file)

    def loader(self, file: Path, columns: Columns | None = COLUMNS) -> PreprocessedLoader:
        return PreprocessedLoader(file, columns, read=self.read)

    def load(self, file: Path) -> Samples:
        return self.loader(file).load()


@pytest.fixture
def reads() -> Reads:
    return Reads()


def conversions(folder: Path) -> list[str]:
    return sorted(
        path.name
        for path in folder.rglob("*")
        if path.is_dir() and "-" in path.name and path.parent.name.endswith(("pkl", "arrays"))
    )


def same(one: Samples, other: Samples) -> bool:
    assert one.stop_words is not None and other.stop_words is not None
    return (
        np.array_equal(one.lengths, other.lengths)
        and np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.stop_words, other.stop_words)
    )


def test_the_second_load_maps_arrays(frame: Path, reads: Reads) -> None:
    first = reads.load(frame)
    references = reads.loader(frame).references()
    second = reads.load(frame)
    assert reads == [frame]
    assert isinstance(second.tokens, np.memmap) and second.tokens.dtype == np.int32
    assert same(first, second) and second.tokens.tolist() == [token for row in ROWS for token in row]
    assert first.note == f"data set converted for later runs: {frame}.arrays" and second.note == ""
    assert references == {"gt_output": [f"antwoord {i} één \udc80" for i in range(800)], "metric": [""] * 800}
    assert [path.name for path in frame.parent.iterdir() if path != frame] == ["set.pkl.arrays"]


def test_a_small_file_is_not_worth_it(tmp_path: Path) -> None:
    file = tmp_path / "small.pkl"
    write_frame(file, {"tok_input": [[1, 2]]})
    assert PreprocessedLoader(file).load().tokens.tolist() == [1, 2]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("keeps_time", [False, True])
def test_a_changed_file_is_converted_again(frame: Path, reads: Reads, keeps_time: bool) -> None:
    """A change is noticed even if size and (as with rsync) time are the same."""
    reads.load(frame)
    before = frame.stat()
    changed = frame.read_bytes().replace(b"M,\x01M-\x01", b"M-\x01M,\x01", 1)
    with frame.open("r+b") as stream:
        stream.write(changed)
    if keeps_time:
        os.utime(frame, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert frame.stat().st_size == before.st_size
    assert reads.load(frame).tokens[:3].tolist() == [301, 300, 302]
    assert len(reads) == 2 and len(conversions(frame.parent)) == 1, "of an earlier state, nothing is kept"


def test_other_columns_are_another_conversion(frame: Path, reads: Reads) -> None:
    for _ in range(2):
        reads.load(frame)
        assert reads.loader(frame, None).load().stop_words is None
    assert len(reads) == 2 and len(conversions(frame.parent)) == 2


def blocked(folder: Path) -> None:
    """Keep anybody, root included, from writing into this folder: a file has its name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("")


def test_a_folder_that_cannot_be_written(frame: Path, reads: Reads, cache: Path) -> None:
    blocked(frame.with_name("set.pkl.arrays"))
    first = reads.load(frame)
    assert same(reads.load(frame), first) and len(reads) == 1
    assert str(cache / "mpillm" / "datasets") in first.note
    reads.load(write(frame.parent.parent / "other" / "set.pkl"))
    assert len(conversions(cache)) == 1 and len(reads) == 2, "the other one's is beside it"


def test_nowhere_to_write(frame: Path, reads: Reads, cache: Path) -> None:
    blocked(frame.with_name("set.pkl.arrays"))
    blocked(cache)
    assert same(reads.load(frame), reads.load(frame)) and len(reads) == 2
    note = reads.load(frame).note
    assert (
        "not stored for later runs" in note
        and "set.pkl.arrays" in note
        and str(cache) in note
        and "\n" not in note
    )


@pytest.mark.parametrize("n_bytes", [0, 4096])  # the header of an array cannot be written, nor its content
def test_a_full_disk(n_bytes: int, frame: Path, cache: Path) -> None:
    with files_of_at_most(n_bytes):
        samples = load(frame)
    assert len(samples.tokens) == sum(map(len, ROWS))
    assert samples.note.startswith("data set converted, but not stored") and "None" not in samples.note
    assert list(frame.parent.iterdir()) == [frame] and not [
        path for path in cache.rglob("*") if path.is_file()
    ]


def test_runs_that_convert_at_once(frame: Path) -> None:
    both = threading.Barrier(2)

    def convert() -> converted.Arrays:
        both.wait(300)  # neither has found a conversion
        return {"tokens": np.arange(10000)}

    found: list[converted.Arrays] = []
    threads = [
        threading.Thread(target=lambda: found.append(converted.converted(frame, "", convert)[0]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [len(arrays["tokens"]) for arrays in found] == [10000, 10000]
    assert len(list(frame.with_name("set.pkl.arrays").iterdir())) == 1
    assert isinstance(converted.converted(frame, "", dict)[0]["tokens"], np.memmap)


def truncate(folder: Path) -> None:
    os.truncate(folder / "tokens.npy", 5000)


def delete(folder: Path) -> None:
    (folder / "stop_words.npy").unlink()


def spoil(folder: Path) -> None:
    (folder / "contents.json").write_text("[")


@pytest.mark.parametrize("damage", [truncate, delete, spoil])
def test_a_damaged_conversion_is_made_again(
    frame: Path, reads: Reads, damage: Callable[[Path], None]
) -> None:
    first = reads.load(frame)
    (folder,) = frame.with_name("set.pkl.arrays").iterdir()
    damage(folder)
    assert same(reads.load(frame), first) and same(reads.load(frame), first)
    assert len(reads) == 2 and list(frame.with_name("set.pkl.arrays").iterdir()) == [folder]


def test_what_a_killed_run_leaves_is_removed_in_time(frame: Path) -> None:
    left, running = (frame.with_name("set.pkl.arrays") / name for name in (".left", ".running"))
    for folder in (left, running):
        folder.mkdir(parents=True)
    os.utime(left, (0, 0))
    load(frame)
    assert running.exists() and not left.exists()


def test_a_file_that_changes_while_it_is_read(frame: Path) -> None:
    """The arrays would be of neither state, so they are not kept."""

    def meanwhile(file: Path) -> Frame:
        found = read_frame(file)
        os.utime(file)
        return found

    samples = PreprocessedLoader(frame, COLUMNS, read=meanwhile).load()
    assert f"{frame} changed while it was read" in samples.note
    assert list(frame.parent.iterdir()) == [frame]


def test_wrong_references_are_wrong_when_they_are_needed(tmp_path: Path, reads: Reads) -> None:
    for change, message in (
        ({"metric": None}, "no column metric"),
        ({"metric": [None] * 800}, "row 0 of column metric is nothing"),
    ):
        file = write(tmp_path / "set" / "wrong.pkl", **change)
        assert len(reads.load(file).lengths) == 800
        reads.clear()
        with pytest.raises(ConfigError, match=message):
            reads.loader(file).references()
        reads.load(file)
        assert len(reads) == 1


def test_a_wrong_frame_leaves_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "set" / "wrong.pkl", tok_input_len=np.zeros(800, np.int64))
    with pytest.raises(
        ConfigError,
        match=r"wrong\.pkl: sample 0 has 600 tokens in column tok_input, but 0 in column tok_input_len",
    ):
        load(file)
    assert list(file.parent.iterdir()) == [file]
