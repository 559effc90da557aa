"""The published data sets, tokenized beforehand: NVIDIA's arrays and MLCommons' pickled data frames.

NVIDIA's preprocessing scripts (``closed/NVIDIA/code/*/tensorrt/preprocess_data.py`` in mlcommons/inference_results_v5.1) write
``input_ids_padded.npy`` (int32, [samples, width], padded at the end), ``input_lens.npy`` (int32, [samples]) and, for Mixtral,
``stop_ids_padded.npy`` (int32, [samples, 4], padded with the end token). MLCommons' own files are data frames with a row per sample
(``language/*/dataset.py`` in mlcommons/inference). Only the harness's rank loads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, nearest
from mpillm.preprocessed import Columns
from mpillm.preprocessed.frames import Frame, read_frame

TOKENS_FILE, LENGTHS_FILE, STOP_FILE = "input_ids_padded.npy", "input_lens.npy", "stop_ids_padded.npy"
FRAME_SUFFIXES = (".pkl", ".pkl.gz")

_CHUNK_ROWS = 1024  # of the padded array, read at once


@dataclass(frozen=True)
class Samples:
    """Sample i's prompt is the next ``lengths[i]`` of `tokens`."""

    file: Path  # where the prompts come from, for messages
    lengths: NDArray[np.int64]
    tokens: NDArray[np.int32]
    stop_words: NDArray[np.int32] | None = None  # shape [samples, width], padded with the end token or with -1


class LLMDataLoader:
    """A preprocessed data set: a folder with the arrays, or a data frame (or the folder that it is in)."""

    def __init__(self, path: Path, columns: Columns | None = None, frame_file: str | None = None) -> None:
        """`frame_file`: the data frame's name, should `path` be a folder without the arrays. ConfigError if nothing fits."""
        self._columns = columns or Columns()
        self._arrays: Path | None = None  # the folder
        self._frame: Path | None = None
        if path.is_dir():
            self._arrays = path if (path / TOKENS_FILE).is_file() else None
            if frame_file is not None:
                self._frame = next((f for suffix in ("", ".gz") if (f := path / (frame_file + suffix)).is_file()), None)
        elif path.name.endswith(FRAME_SUFFIXES):
            self._frame = path
        elif path.name == TOKENS_FILE:
            self._arrays = path.parent
        if self._arrays is None and self._frame is None:
            wanted = f"a folder with {TOKENS_FILE} and {LENGTHS_FILE}" + (f", or with {frame_file}[.gz]" if frame_file else "")
            raise ConfigError(f"data set {path} {'is not' if path.exists() else 'does not exist; expected'} {wanted}")
        if not path.exists():
            raise ConfigError(f"data set {path} does not exist{nearest(path.name, [f.name for f in path.parent.glob('*')])}")

    @staticmethod
    def reads(path: Path) -> bool:
        """Whether `path` is for this loader and not a JSONL file."""
        return path.is_dir() or path.suffix == ".npy" or path.name.endswith(FRAME_SUFFIXES)

    def load(self) -> Samples:
        """All prompts. ConfigError names the file, and the sample if one is at fault: a wrong type or shape, a missing column, lengths
        that are not those of the prompts, or of another number of samples."""
        return self._load_arrays(self._arrays) if self._arrays is not None else self._load_frame()

    def references(self) -> dict[str, list[str]]:
        """The reference columns of the data frame; read now, and not kept."""
        if self._frame is None:
            raise ConfigError(f"data set {self._arrays}: the references are in the data frame (a .pkl file), which is not there")
        frame = read_frame(self._frame)
        return {column: frame.texts(column) for column in self._columns.references}

    def _load_arrays(self, folder: Path) -> Samples:
        file = folder / TOKENS_FILE
        padded, lengths = _array(file, 2), np.array(_array(folder / LENGTHS_FILE, 1), np.int64)
        n, width = padded.shape
        if len(lengths) != n:
            raise ConfigError(f"{folder / LENGTHS_FILE} has {len(lengths)} samples, {TOKENS_FILE} has {n}")
        wrong = np.flatnonzero((lengths < 1) | (lengths > width))
        if len(wrong):
            raise ConfigError(f"{folder / LENGTHS_FILE}: sample {wrong[0]} has length {lengths[wrong[0]]}; {TOKENS_FILE} has 1 to {width}")
        tokens = np.empty(int(lengths.sum()), np.int32)
        done = 0
        with file.open("rb") as stream:  # not through the map: its pages would count as this process's memory
            stream.seek(padded.offset)
            for first in range(0, n, _CHUNK_ROWS):
                rows = np.fromfile(stream, padded.dtype, min(_CHUNK_ROWS, n - first) * width).reshape(-1, width)
                there = np.arange(width) < lengths[first : first + len(rows), None]
                chunk = rows[there]
                if chunk.dtype.itemsize > 4 and len(chunk) and not -(2**31) <= int(chunk.min()) <= int(chunk.max()) < 2**31:
                    raise ConfigError(f"{file}: samples {first} to {first + len(rows) - 1} have a token that is no int32")
                tokens[done : done + len(chunk)] = chunk
                done += len(chunk)
        stop_words = None
        if (folder / STOP_FILE).is_file():
            stop_words = np.array(_array(folder / STOP_FILE, 2), np.int32)
            if len(stop_words) != n:
                raise ConfigError(f"{folder / STOP_FILE} has {len(stop_words)} samples, {TOKENS_FILE} has {n}")
        return Samples(file, lengths, tokens, stop_words)

    def _load_frame(self) -> Samples:
        assert self._frame is not None
        file, columns = self._frame, self._columns
        frame = read_frame(file)
        lengths, tokens = frame.tokens(columns.tokens)
        if not len(lengths):
            raise ConfigError(f"data set {file} is empty")
        empty = np.flatnonzero(lengths == 0)
        if len(empty):
            raise ConfigError(f"{file}: sample {empty[0]} has no tokens in column {columns.tokens}")
        if columns.lengths is not None:
            said = frame.integers(columns.lengths)
            wrong = np.flatnonzero(said != lengths)
            if len(wrong):
                i = wrong[0]
                raise ConfigError(
                    f"{file}: sample {i} has {lengths[i]} tokens in column {columns.tokens}, {columns.lengths} says {said[i]}"
                )
        return Samples(file, lengths, tokens, _padded(frame, columns.stop_words) if columns.stop_words else None)


def _padded(frame: Frame, column: str) -> NDArray[np.int32]:
    """A column of lists as rows of one width, padded with -1."""
    lengths, tokens = frame.tokens(column)
    rows = np.full((len(lengths), int(lengths.max(initial=1))), -1, np.int32)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = tokens
    return rows


def _array(file: Path, n_dimensions: int) -> np.memmap[tuple[int, ...], np.dtype[np.int64]]:
    """An array of integers in a .npy file, mapped."""
    try:
        mapped = np.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ConfigError(f"data set {file.parent} has no {file.name}") from None
    except OSError as error:
        raise ConfigError(f"data set {file} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{file}: truncated, or not a .npy file of numbers: {error}") from None
    if not isinstance(mapped, np.memmap):
        raise ConfigError(f"{file}: an archive of arrays, not a .npy file")
    if mapped.dtype.kind not in "iu" or mapped.ndim != n_dimensions or mapped.size == 0:
        raise ConfigError(f"{file}: {mapped.dtype} of shape {list(mapped.shape)}; expected integers, {n_dimensions} dimensions")
    if n_dimensions == 2 and not mapped.flags.c_contiguous:
        raise ConfigError(f"{file} is stored by columns (Fortran order); samples must be rows")
    return mapped
