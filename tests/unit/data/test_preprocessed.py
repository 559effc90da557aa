"""The published data sets: arrays and data frames, and all that can be wrong with them or between them and a
model."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.dataset import Dataset, PromptLimits, load_dataset
from mpillm.data.preprocessed.frames import read_frame
from mpillm.data.preprocessed.loader import PreprocessedLoader, is_frame, loader_of
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.workloads import WORKLOADS
from mpillm.workloads.workload import Columns
from tests.helpers.data_frames import write_frame

ROWS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
COLUMNS = Columns("tok_input", "tok_input_len", "tok_stop_sequence", ("gt_output",))
WORDS = [[2], [13, 40, 13], [2], [13, 40, 13]]
LIMITS = PromptLimits(vocab_size=50, end_ids=(2,), stop_words=((13, 40, 13),))


def arrays(
    folder: Path, rows: list[list[int]] = ROWS, width: int = 4, dtype: Any = np.int32, words: bool = False
) -> Path:
    padded = np.full((len(rows), width), 2, dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    np.save(folder / "input_ids_padded.npy", padded)
    np.save(folder / "input_lens.npy", np.array([len(row) for row in rows], np.int32))
    if words:
        np.save(folder / "stop_ids_padded.npy", np.array([[*word, 2, 2, 2][:4] for word in WORDS], np.int32))
    return folder


def frame(folder: Path, **change: Any) -> Path:
    columns: dict[str, Any] = {
        "tok_input": ROWS,
        "tok_input_len": np.array([len(row) for row in ROWS]),
        "tok_stop_sequence": WORDS,
        "gt_output": ["a", "b", "c", "d"],
    } | change
    write_frame(folder / "set.pkl", {name: values for name, values in columns.items() if values is not None})
    return folder / "set.pkl"


def load(path: Path, limits: PromptLimits = LIMITS, frame_file: str | None = None) -> Dataset:
    return load_dataset(PreprocessedLoader(path, COLUMNS, frame_file), ByteTokenizer(), limits)


def prompts(dataset: Dataset) -> list[list[int]]:
    return [dataset.sample(i).tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_arrays(dtype: Any, tmp_path: Path) -> None:
    for path in (arrays(tmp_path, dtype=dtype), tmp_path / "input_ids_padded.npy"):
        dataset = load(path)
        assert prompts(dataset) == ROWS and dataset.tokens.dtype == np.int32 and dataset.ignores_stop is None
        lengths, tokens = dataset.gather(np.array([3, 0]))
        assert lengths.tolist() == [4, 3] and tokens.tolist() == ROWS[3] + ROWS[0]


def test_more_rows_than_are_read_at_once(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [random.integers(0, 50, random.integers(1, 8)).tolist() for _ in range(2500)]
    assert prompts(load(arrays(tmp_path, rows, 7))) == rows


def test_frame_and_stop_words(tmp_path: Path) -> None:
    path = frame(tmp_path)
    for dataset in (
        load(path),
        load(tmp_path, frame_file="set.pkl"),
        load(arrays(tmp_path, words=True), frame_file="set.pkl"),
    ):
        assert prompts(dataset) == ROWS
        assert dataset.ignores_stop is not None and dataset.ignores_stop.tolist() == [
            True,
            False,
            True,
            False,
        ]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, or in a folder; without the workload's tokens it has rows, as without a workload."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    tokens = pyarrow.array(ROWS, pyarrow.list_(pyarrow.int64()))
    lengths = [len(row) for row in ROWS]
    table = {
        "tok_input": tokens,
        "tok_input_len": lengths,
        "tok_stop_sequence": WORDS,
        "gt_output": list("abcd"),
    }
    parquet.write_table(pyarrow.table(table), file := tmp_path / "set.parquet")
    for dataset in (load(file), load(tmp_path, frame_file="set.pkl")):
        assert prompts(dataset) == ROWS and dataset.ignores_stop is not None
    assert PreprocessedLoader(file, COLUMNS).references() == {"gt_output": ["a", "b", "c", "d"]}
    assert is_frame(file, WORKLOADS["llama2-70b"]) and not is_frame(file, WORKLOADS["gpt-oss-120b"])
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"set\.parquet: damaged, or not Parquet"):
        read_frame(file)
    monkeypatch.setattr("mpillm.data.preprocessed.frames._MAX_PARQUET", 0)
    monkeypatch.setattr("mpillm.data.preprocessed.frames._SMALL_PARQUET", 10)
    parquet.write_table(pyarrow.table(table), file)
    with pytest.raises(ConfigError, match="column tok_input expands to more than 10 bytes"):
        read_frame(file).tokens("tok_input")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"x\.parquet needs pyarrow: pip install 'mpillm\[parquet\]'"):
        read_frame(tmp_path / "x.parquet")


def test_a_folder_with_several_data_sets(tmp_path: Path) -> None:
    """A workload takes its own; otherwise the user is asked to name one, but not the calibration set."""
    rows = [{"tok_input": row, "output": "a"} for row in ROWS]
    names = "cnn_eval.json", "sample_cnn_eval_5000.json", "cnn_dailymail_calibration.json"
    for i, name in enumerate(names):
        (tmp_path / name).write_text(json.dumps(rows[: i + 1]))
        (tmp_path / f"{name}.md5").touch()
    for workload, n in (("llama3.1-8b", 1), ("llama3.1-8b-edge", 2)):
        assert len(load_dataset(loader_of(tmp_path, WORKLOADS[workload]), ByteTokenizer(), LIMITS)) == n
    with pytest.raises(ConfigError, match=r"; it has cnn_eval\.json, sample_cnn_eval_5000\.json: name one"):
        loader_of(tmp_path, None)
    (tmp_path / names[0]).unlink()
    with pytest.raises(ConfigError, match=r"with cnn_eval\.json.*; it has sample_cnn_eval_5000\.json: name"):
        loader_of(tmp_path, WORKLOADS["llama3.1-8b"])


def test_references_are_read_on_request(tmp_path: Path) -> None:
    loader = PreprocessedLoader(frame(tmp_path), COLUMNS)
    assert loader.references() == {"gt_output": ["a", "b", "c", "d"]}
    with pytest.raises(
        ConfigError, match=r"no references, which are in the published data frame: name that instead"
    ):
        PreprocessedLoader(arrays(tmp_path), COLUMNS).references()


def change(name: str, make: Callable[[np.ndarray[Any, Any]], Any]) -> Callable[[Path], Path]:
    """Return `arrays` with one of its files changed."""

    def changed(folder: Path) -> Path:
        arrays(folder, words=True)
        np.save(folder / name, make(np.load(folder / name)), allow_pickle=True)
        return folder

    return changed


def truncated(folder: Path) -> Path:
    file = arrays(folder) / "input_ids_padded.npy"
    file.write_bytes(file.read_bytes()[:-4])
    return folder


def without(name: str) -> Callable[[Path], Path]:
    def less(folder: Path) -> Path:
        (arrays(folder) / name).unlink()
        return folder

    return less


def no_array(folder: Path) -> Path:
    (arrays(folder) / "input_lens.npy").write_bytes(b"3 1 2 4\n")
    return folder


def archive(folder: Path) -> Path:
    packed = io.BytesIO()
    np.savez(packed, a=np.arange(3))
    (arrays(folder) / "input_lens.npy").write_bytes(packed.getvalue())
    return folder


TOKENS, LENS, STOPS = "input_ids_padded.npy", "input_lens.npy", "stop_ids_padded.npy"
WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing there": (
        lambda f: f / "open_orca",
        "open_orca does not exist; expected a folder with input_ids_padded.npy and input_lens",
    ),
    "an empty folder": (
        lambda f: f,
        "is not a folder with input_ids_padded.npy and input_lens.npy, or with set.pkl[.gz]",
    ),
    "a missing frame": (
        lambda f: frame(f).with_name("sets.pkl"),
        "sets.pkl does not exist (did you mean 'set.pkl'?)",
    ),
    "another array": (lambda f: arrays(f) / LENS, "input_lens.npy is not a folder with input_ids_padded.npy"),
    "no lengths": (without(LENS), "has no input_lens.npy"),
    "truncated": (truncated, "input_ids_padded.npy: truncated, or not a .npy file"),
    "text": (no_array, "input_lens.npy: truncated, or not a .npy file"),
    "an archive": (archive, "input_lens.npy: an archive of arrays"),
    "objects": (
        change(LENS, lambda a: a.astype(object)),
        "input_lens.npy: truncated, or not a .npy file of numbers",
    ),
    "floats": (
        change(TOKENS, lambda a: a.astype(np.float32)),
        "float32 of shape [4, 4]; expected integers, 2 dimensions",
    ),
    "one dimension": (change(TOKENS, np.ravel), "int32 of shape [16]; expected integers, 2 dimensions"),
    "by columns": (change(TOKENS, np.asfortranarray), "Fortran order"),
    "fewer lengths": (
        change(LENS, lambda a: a[:3]),
        "input_lens.npy has 3 samples, input_ids_padded.npy has 4",
    ),
    "a longer length": (
        change(LENS, lambda a: a + np.array([0, 0, 3, 0])),
        "sample 2 has length 5; input_ids_padded.npy has 1 to 4",
    ),
    "no length": (change(LENS, lambda a: a - [0, 1, 0, 0]), "input_lens.npy: sample 1 has length 0"),
    "fewer stop words": (
        change(STOPS, lambda a: a[1:]),
        "stop_ids_padded.npy has 3 samples, input_ids_padded.npy has 4",
    ),
    "an unknown stop word": (
        change(STOPS, lambda a: np.where(a == 40, 41, a)),
        "sample 1 has stop word [13, 41, 13]; the stop words of this run (--stop_words) are: [13, 40, 13]",
    ),
    "a huge token": (
        change(TOKENS, lambda a: a.astype(np.int64) << 40),
        "have a token that does not fit int32",
    ),
    "outside the vocabulary": (
        change(TOKENS, lambda a: a + 40),
        "sample 3 has token 54; the model's are 0 to 49",
    ),
    "a negative token": (change(TOKENS, lambda a: a - 6), "sample 0 has token -1; the model's are 0 to 49"),
    "frame: no column": (
        lambda f: frame(f, tok_input=None, tok_inputs=ROWS),
        "no column tok_input (did you mean 'tok_inputs'?)",
    ),
    "frame: no stop words": (lambda f: frame(f, tok_stop_sequence=None), "no column tok_stop_sequence"),
    "frame: texts": (
        lambda f: frame(f, tok_input=["a", "b", "c", "d"]),
        "row 0 of column tok_input is not a list of tokens: it is text",
    ),
    "frame: an empty prompt": (
        lambda f: frame(f, tok_input=[[1], [], [2], [3]]),
        "sample 1 has no tokens in column tok_input",
    ),
    "frame: other lengths": (
        lambda f: frame(f, tok_input_len=np.array([3, 1, 2, 5])),
        "sample 3 has 4 tokens in column tok_input, but 5 in column tok_input_len",
    ),
    "frame: outside the vocabulary": (
        lambda f: frame(f, tok_input=[*ROWS[:2], [9, 50], ROWS[3]]),
        "sample 2 has token 50",
    ),
    "frame: truncated": (lambda f: cut(frame(f)), "truncated or damaged"),
}


def cut(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-20])
    return file


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(case: str, tmp_path: Path) -> None:
    make, message = WRONG[case]
    path = make(tmp_path)
    with pytest.raises(ConfigError) as error:
        load(path, frame_file="set.pkl")
    assert str(tmp_path) in str(error.value) and message in str(error.value)


def test_lengths_that_do_not_fit_the_model(tmp_path: Path) -> None:
    path = arrays(tmp_path)
    assert len(load(path, PromptLimits(50, max_seq_len=7, max_output_len=3, max_prompt_len=4))) == 4
    for limits, message in (
        (
            PromptLimits(50, max_seq_len=6, max_output_len=3),
            "sample 3: the prompt has 4 tokens and does not fit",
        ),
        (
            PromptLimits(50, max_seq_len=5, max_output_len=3),
            "(2 of 4 samples are too long; this is the longest)",
        ),
        (
            PromptLimits(50, max_prompt_len=3),
            "sample 3: the prompt has 4 tokens and does not fit --max_num_tokens 3 without"
            " `--enable_chunked_context true`",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            load(path, limits)
        assert str(tmp_path / TOKENS) in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("damage", [b"'descr': '<i4", b"\0" * 13, b"{(((((((((((("])
def test_a_header_that_numpy_cannot_read(damage: bytes, tmp_path: Path) -> None:
    """It raises other errors than it says."""
    file = arrays(tmp_path) / "input_lens.npy"
    file.write_bytes(file.read_bytes()[:10] + damage + file.read_bytes()[10 + len(damage) + 3 :])
    with pytest.raises(
        ConfigError, match=r"input_lens.npy: (truncated, or not a .npy file|.*expected integers)"
    ):
        PreprocessedLoader(tmp_path).load()
