"""`requests.bin`: when each request of a test was issued, got its first token and its whole answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.comms.messages import PROMPT_COUNTS
from mpillm.files import naming
from mpillm.report.run_directory import REQUESTS

RECORD = np.dtype(
    [
        ("issued", "<f8"),  # seconds from the test's start
        ("ttft", "<f4"),  # seconds; NaN: no token before the end of the answer
        ("latency", "<f4"),  # of the whole answer, seconds
        ("index", "<i4"),  # in the data set
        ("tokens", "<i4"),  # of the answer
        ("error", "<u4"),  # 1: the answer is an error
        ("prompt", "<i4"),  # tokens of the prompt, as the instance counted them; -1: unknown
        ("cached", "<i4"),  # those of them that were in a KV cache; -1: unknown
        ("session", "<u4"),  # the same for all requests of one conversation; 0: of no conversation
        ("turn", "<u4"),  # number of the request in its conversation, from 0
    ]
)
"""One request, in the order in which answers came. 44 bytes."""
MAGIC = b"request2"
"""The beginning of the file. Files of 1.0.0rc1 have neither this nor the last four fields."""

_OLD_RECORD = np.dtype([(name, RECORD[name]) for name in (RECORD.names or ())[:-4]])
_UNRELEASED = b"requests"  # the beginning of files with records of another size
_BUFFER_BYTES = 1 << 16
_LONGEST_S = 1e8  # of a test: 3 years
# Records are written in batches: creating records takes NumPy 20 µs, however few.
_CALLS = 256  # of `add`, in one batch
_ROWS = 4096  # 180 kB, in one batch


class RequestLog:
    """Writes a record for each answer, in batches; constant size."""

    def __init__(self, folder: Path, first: NDArray[np.int64] | None = None) -> None:
        """The file is created with the first record. `first`: see `Turns`; None: no conversations."""
        self._path = folder / REQUESTS
        self._first = first
        self._file: BinaryIO | None = None
        self._added: list[tuple[NDArray[Any], ...]] = []  # the columns of answers that are not written yet
        self._n_added = 0  # rows in `_added`
        # Rows that came after `_added`.
        self._ones: list[tuple[float, float, float, int, int, bool, tuple[int, int], int]] = []

    def add(
        self,
        issued: NDArray[np.float64],
        first: NDArray[np.float64],
        ended: float,
        index: NDArray[np.int64],
        tokens: NDArray[np.int64],
        error: NDArray[np.bool_],
        counts: NDArray[np.void],
        sessions: NDArray[np.uint32],
    ) -> None:
        """Add answers that came together at `ended`: arrays with an entry each, times in seconds of the test.

        `first`: NaN where there was no first token. `counts`: `PROMPT_COUNTS`, of the prompts. `sessions`: 0
        if they are not of conversations. The arrays are kept. Raises OSError, with the file's name, if the
        disk is full.
        """
        self._take_ones()
        self._added.append((issued, first, ended - issued, index, tokens, error, counts, sessions))
        self._n_added += len(index)
        if len(self._added) >= _CALLS or self._n_added >= _ROWS:
            self._write()

    def add_one(
        self,
        issued: float,
        first: float,
        ended: float,
        index: int,
        tokens: int,
        error: bool,
        counts: tuple[int, int] = (-1, -1),
        session: int = 0,
    ) -> None:
        """Do as `add`, for one answer."""
        self._ones.append((issued, first, ended - issued, index, tokens, error, counts, session))
        if len(self._ones) >= _CALLS:
            self._write()

    def _take_ones(self) -> None:
        if self._ones:
            *columns, counts, sessions = zip(*self._ones, strict=True)
            pairs = np.array(list(counts), PROMPT_COUNTS)
            self._added.append((*map(np.array, columns), pairs, np.array(sessions, np.uint32)))
            self._ones.clear()

    def _write(self) -> None:
        self._take_ones()
        if not self._added:
            return
        issued, first, latency, index, tokens, error, counts, sessions = map(
            np.concatenate, zip(*self._added, strict=True)
        )
        self._added.clear()
        self._n_added = 0
        rows = np.empty(len(issued), RECORD)
        rows["issued"], rows["ttft"], rows["latency"] = issued, first - issued, latency
        rows["index"], rows["tokens"], rows["error"] = index, tokens, error
        rows["prompt"], rows["cached"] = counts["prompt"], counts["cached"]
        rows["session"] = sessions
        rows["turn"] = 0 if self._first is None else turns_of(index, self._first)
        with naming(self._path):
            if self._file is None:
                self._file = self._path.open("wb", buffering=_BUFFER_BYTES)
                self._file.write(MAGIC)
            self._file.write(rows.tobytes())

    def flush(self) -> None:
        """Write all records so far, for readers; does nothing after `close`. Raises OSError as `add`."""
        if self._file is not None and self._file.closed:
            return
        self._write()
        if self._file is not None:
            with naming(self._path):
                self._file.flush()

    def close(self) -> None:
        """Close the file. Raises OSError as `add`."""
        self.flush()
        if self._file is not None:
            self._file.close()


def read_requests(folder: Path | str) -> NDArray[np.void]:
    """Return the valid records of a run, `RECORD`, in order of issue. An incomplete last record is left out.

    `folder`: the run directory, or the file in it. The run may still go on. Raises ConfigError if there is no
    such file, or it cannot be read.
    """
    folder = Path(folder)
    rows = _records(folder.parent if folder.name == REQUESTS else folder)
    rows = rows[_possible(rows)]
    return rows[np.argsort(rows["issued"], kind="stable")]


def turns_of(index: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of each request in its conversation, from 0.

    `index`: of the requests in the data set; `first`: see `Turns`.
    """
    turns: NDArray[np.int64] = index - first[np.searchsorted(first, index, "right") - 1]
    return turns


def tpot_s(rows: NDArray[np.void]) -> NDArray[np.float64]:
    """Return seconds per output token after the first, by request; NaN for answers of one token."""
    with np.errstate(divide="ignore", invalid="ignore"):
        after = rows["latency"].astype(np.float64) - rows["ttft"]
        return np.where(rows["tokens"] > 1, after / (rows["tokens"] - 1.0), np.nan)


def damaged_requests(folder: Path) -> tuple[int, int]:
    """Return the number of invalid records, and of all records; 0 without a file.

    Raises ConfigError if the file cannot be read.
    """
    rows = _records(folder) if (folder / REQUESTS).exists() else np.empty(0, RECORD)
    return len(rows) - int(_possible(rows).sum()), len(rows)


def _records(folder: Path) -> NDArray[np.void]:
    path = folder / REQUESTS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {REQUESTS}: none of its requests was answered, or an older mpillm wrote it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if data.startswith(_UNRELEASED):
        raise ConfigError(f"{path}: a version of mpillm wrote it that was never released; repeat the test")
    if data.startswith(MAGIC):
        n = (len(data) - len(MAGIC)) // RECORD.itemsize
        return np.frombuffer(data, RECORD, n, len(MAGIC))
    old = np.frombuffer(data, _OLD_RECORD, len(data) // _OLD_RECORD.itemsize)
    rows = np.zeros(len(old), RECORD)
    for name in _OLD_RECORD.names or ():
        rows[name] = old[name]
    rows["prompt"] = rows["cached"] = -1
    return rows


def _possible(rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which records are valid: others would spoil charts and figures."""
    valid: NDArray[np.bool_] = (rows["index"] >= 0) & (rows["tokens"] >= 0) & (rows["error"] < 2)
    valid &= abs(rows["issued"]) < _LONGEST_S
    valid &= (rows["cached"] >= -1) & (rows["prompt"] >= -1)
    for name in ("ttft", "latency"):
        valid &= ((rows[name] > -1) & (rows[name] < _LONGEST_S)) | (np.isnan(rows[name]) & (name == "ttft"))
    return valid
