"""The published data sets, tokenized beforehand: NVIDIA's arrays and MLCommons' data frames.

NVIDIA's preprocessing scripts (``closed/NVIDIA/code/*/tensorrt/preprocess_data.py`` in
mlcommons/inference_results_v5.1) write ``input_ids_padded.npy`` (int32, [samples, width], padded at the end),
``input_lens.npy`` (int32, [samples]) and, for Mixtral, ``stop_ids_padded.npy`` (int32, [samples, 4], padded
with the end token). MLCommons' own files are data frames with a row per sample (``language/*/dataset.py`` in
mlcommons/inference). They are converted to arrays on first use. Only the harness's rank loads a data set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, nearest
from disagg.text_file import check_file
from mpillm.data.data_loader import LLMDataLoader, Samples
from mpillm.data.preprocessed.converted import Arrays, converted, load_npy
from mpillm.data.preprocessed.frames import JSON_SUFFIX, PARQUET_SUFFIX, Frame, fits_int32, read_frame
from mpillm.workloads.workload import Columns, Workload

TOKENS_FILE, LENGTHS_FILE, STOP_FILE = "input_ids_padded.npy", "input_lens.npy", "stop_ids_padded.npy"
FRAME_SUFFIXES = (".pkl", ".pkl.gz", JSON_SUFFIX)  # for this loader, also without a workload
_CALIBRATION = "calibration"  # in names of files that a test must not use

_TEXT, _ENDS = "reference", "_ends"  # parts of names of arrays
_MAX_CHOICES = 5
_CHUNK_ROWS = 1024  # rows of the padded array in one read


def is_frame(path: Path, workload: Workload) -> bool:
    """Return whether a Parquet file has a workload's tokens; otherwise its rows are as without a workload."""
    return path.suffix == PARQUET_SUFFIX and workload.columns.tokens in read_frame(path).columns


def loader_of(path: Path, workload: Workload | None) -> PreprocessedLoader:
    """Return the loader of `path`, as the data set of `workload`; None: not a workload's data set."""
    if workload is None:
        return PreprocessedLoader(path)
    return PreprocessedLoader(path, workload.columns, workload.frame_file)


class PreprocessedLoader(LLMDataLoader):
    """A preprocessed data set: a folder with the arrays, or a data frame (or its folder)."""

    def __init__(
        self,
        path: Path,
        columns: Columns | None = None,
        frame_file: str | None = None,
        read: Callable[[Path], Frame] = read_frame,
    ) -> None:
        """`frame_file`: name of the data frame in a folder without arrays; `read`: reads the data frame.

        Raises ConfigError if the folder has neither arrays nor data frame, or `path` is a pipe or a device.
        """
        check_file(path)
        self._columns, self._read_frame = columns or Columns(), read
        self._arrays: Path | None = None  # the folder with the arrays
        self.frame: Path | None = None  # the data frame
        if path.is_dir():
            self._arrays = path if (path / TOKENS_FILE).is_file() else None
            if frame_file is not None:
                names = frame_file, f"{frame_file}.gz", Path(frame_file).stem + PARQUET_SUFFIX
                self.frame = next((file for name in names if (file := path / name).is_file()), None)
        elif path.name.endswith((*FRAME_SUFFIXES, PARQUET_SUFFIX)):
            self.frame = path
        elif path.name == TOKENS_FILE:
            self._arrays = path.parent
        if self._arrays is None and self.frame is None:
            expected = f"a folder with {TOKENS_FILE} and {LENGTHS_FILE}"
            expected += f", or with {frame_file}[.gz]" if frame_file else ""
            raise ConfigError(
                f"data set {path} {'is not' if path.exists() else 'does not exist; expected'} {expected}"
                f"{_choices(path)}"
            )
        if not path.exists():
            siblings = [file.name for file in path.parent.glob("*")]
            raise ConfigError(f"data set {path} does not exist{nearest(path.name, siblings)}")

    @staticmethod
    def reads(path: Path) -> bool:
        """Return whether `path` is for this loader, not a JSONL file."""
        return path.is_dir() or path.suffix == ".npy" or path.name.endswith(FRAME_SUFFIXES)

    def load(self) -> Samples:
        """Read all prompts.

        Raises ConfigError, with the file and the sample, for a wrong type or shape, a missing column, or
        wrong lengths.
        """
        return self._load_arrays(self._arrays) if self._arrays is not None else self._load_frame()

    def references(self) -> dict[str, list[str]]:
        """Read the reference columns of the data frame."""
        if self.frame is None:
            raise ConfigError(
                f"data set {self._arrays}: no references, which are in the published data frame: "
                "name that instead"
            )
        arrays, _ = self._converted(self.frame)
        names = {column: f"{_TEXT}{i}" for i, column in enumerate(self._columns.references)}
        if all(name in arrays for name in names.values()):
            return {
                column: _unpacked(arrays[name], arrays[f"{name}{_ENDS}"]) for column, name in names.items()
            }
        frame = self._read_frame(self.frame)  # raises ConfigError if the references are wrong
        return {column: frame.texts(column) for column in names}

    def _load_arrays(self, folder: Path) -> Samples:
        file = folder / TOKENS_FILE
        padded, lengths = _array(file, 2), np.array(_array(folder / LENGTHS_FILE, 1), np.int64)
        n, width = padded.shape
        if len(lengths) != n:
            raise ConfigError(f"{folder / LENGTHS_FILE} has {len(lengths)} samples, {TOKENS_FILE} has {n}")
        wrong = np.flatnonzero((lengths < 1) | (lengths > width))
        if len(wrong):
            length = lengths[wrong[0]]
            raise ConfigError(
                f"{folder / LENGTHS_FILE}: sample {wrong[0]} has length {length}; "
                f"{TOKENS_FILE} has 1 to {width}"
            )
        tokens = np.empty(int(lengths.sum()), np.int32)
        done = 0
        with file.open("rb") as stream:  # mapped pages would count as this process's memory
            stream.seek(padded.offset)
            for first in range(0, n, _CHUNK_ROWS):
                n_rows = min(_CHUNK_ROWS, n - first)
                rows = np.fromfile(stream, padded.dtype, n_rows * width).reshape(-1, width)
                is_token = np.arange(width) < lengths[first : first + len(rows), None]
                chunk = rows[is_token]
                if not fits_int32(chunk):
                    last = first + len(rows) - 1
                    raise ConfigError(
                        f"{file}: samples {first} to {last} have a token that does not fit int32"
                    )
                tokens[done : done + len(chunk)] = chunk
                done += len(chunk)
        stop_words = None
        if (folder / STOP_FILE).is_file():
            stop_words = np.array(_array(folder / STOP_FILE, 2), np.int32)
            if len(stop_words) != n:
                raise ConfigError(
                    f"{folder / STOP_FILE} has {len(stop_words)} samples, {TOKENS_FILE} has {n}"
                )
        return Samples(file, lengths, tokens, stop_words)

    def _load_frame(self) -> Samples:
        assert self.frame is not None
        arrays, note = self._converted(self.frame)
        return Samples(self.frame, arrays["lengths"], arrays["tokens"], arrays.get("stop_words"), note)

    def _converted(self, file: Path) -> tuple[Arrays, str]:
        return converted(file, repr(self._columns), lambda: _convert(self._read_frame(file), self._columns))


def _choices(folder: Path) -> str:
    """Return the end of a message: data sets in a folder that the user may name; "" without any."""
    names = sorted(
        file.name
        for file in folder.glob("*")
        if file.name.endswith((*FRAME_SUFFIXES, PARQUET_SUFFIX)) and _CALIBRATION not in file.name
    )
    more = f" and {len(names) - _MAX_CHOICES} more" if len(names) > _MAX_CHOICES else ""
    return f"; it has {', '.join(names[:_MAX_CHOICES])}{more}: name one of them" if names else ""


def _convert(frame: Frame, columns: Columns) -> Arrays:
    """Return the columns as arrays. Wrong references are left out, because not every run needs them.

    Raises ConfigError if the prompts are wrong.
    """
    file = frame.file
    lengths, tokens = frame.tokens(columns.tokens)
    if not len(lengths):
        raise ConfigError(f"data set {file} is empty")
    empty = np.flatnonzero(lengths == 0)
    if len(empty):
        raise ConfigError(f"{file}: sample {empty[0]} has no tokens in column {columns.tokens}")
    if columns.lengths is not None:
        stored = frame.integers(columns.lengths)
        wrong = np.flatnonzero(stored != lengths)
        if len(wrong):
            i = wrong[0]
            raise ConfigError(
                f"{file}: sample {i} has {lengths[i]} tokens in column {columns.tokens}, "
                f"but {stored[i]} in column {columns.lengths}"
            )
    arrays: dict[str, NDArray[Any]] = {"lengths": lengths, "tokens": tokens}
    if columns.stop_words:
        arrays["stop_words"] = _padded(frame, columns.stop_words)
    with contextlib.suppress(ConfigError):
        for i, column in enumerate(columns.references):
            arrays[f"{_TEXT}{i}"], arrays[f"{_TEXT}{i}{_ENDS}"] = _packed(frame.texts(column))
    return arrays


def _packed(texts: list[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the texts in UTF-8, back to back, and the end of each text."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), ends


def _unpacked(packed: NDArray[np.uint8], ends: NDArray[np.int64]) -> list[str]:
    raw, places = packed.tobytes(), [0, *ends.tolist()]
    return [raw[begin:end].decode("utf-8", "surrogatepass") for begin, end in pairwise(places)]


def _padded(frame: Frame, column: str) -> NDArray[np.int32]:
    """Return a column of lists as rows of one width, padded with -1."""
    lengths, tokens = frame.tokens(column)
    rows = np.full((len(lengths), int(lengths.max(initial=1))), -1, np.int32)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = tokens
    return rows


def _array(file: Path, n_dimensions: int) -> np.memmap[tuple[int, ...], np.dtype[np.int64]]:
    """Map the array of integers in a .npy file."""
    try:
        mapped = load_npy(file, is_mapped=True)
    except FileNotFoundError:
        raise ConfigError(f"data set {file.parent} has no {file.name}") from None
    except OSError as error:
        raise ConfigError(f"data set {file} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        # NumPy takes a file without the magic number for a pickle, so its message is about pickles.
        detail = "" if "pickle" in str(error) else f": {error}"
        raise ConfigError(f"{file}: truncated, or not a .npy file of numbers{detail}") from None
    if not isinstance(mapped, np.memmap):
        raise ConfigError(f"{file}: an archive of arrays, not a .npy file")
    if mapped.dtype.kind not in "iu" or mapped.ndim != n_dimensions or mapped.size == 0:
        actual = f"{mapped.dtype} of shape {list(mapped.shape)}"
        raise ConfigError(f"{file}: {actual}; expected integers, {n_dimensions} dimensions")
    if n_dimensions == 2 and not mapped.flags.c_contiguous:
        raise ConfigError(f"{file} is stored by columns (Fortran order); samples must be rows")
    return mapped
