"""The columns of published data frames: pandas' pickles (extra ``datasets``), Parquet (pyarrow), and JSON."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import mmap
import pickle
import re
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, nearest
from mpillm.data.json_array import not_lines
from mpillm.files import DATA_ERRORS

_BETWEEN = re.compile(r"[\s,]*")


def json_rows(file: Path, chunk: int = 1 << 20) -> Iterator[dict[str, Any]]:
    """Yield the objects of the list in `file`. Lists of integers become arrays, shape [length], int32.

    The file is read in pieces of `chunk` characters, because it has hundreds of megabytes: each line has one
    token. Raises ConfigError if the file cannot be read, is truncated, or has other content.
    """
    try:
        with file.open(encoding="utf-8-sig") as stream:
            decode = json.JSONDecoder(object_hook=_packed).raw_decode
            text = stream.read(chunk).lstrip()
            if not text.startswith("["):
                raise ConfigError(f"{file}: not a JSON list of objects, which a data set is")
            place = 1
            while True:
                if (match := _BETWEEN.match(text, place)) is not None:
                    place = match.end()
                if text.startswith("]", place):
                    return
                try:
                    row, end = decode(text, place)
                except ValueError as error:  # the row may continue in the next piece
                    # Each piece doubles the text, which bounds how often a long row is parsed.
                    if not (more := stream.read(max(chunk, len(text) - place))):
                        raise ConfigError(f"{file}: truncated, or not JSON: {error}") from None
                    text, place = text[place:] + more, 0
                    continue
                except RecursionError:
                    raise ConfigError(f"{file}: not a data set: nested too deep") from None
                if not isinstance(row, dict):
                    raise ConfigError(f"{file}: not a JSON list of objects, which a data set is")
                yield row
                place = end
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8: {error}") from None
    except OSError as error:
        raise ConfigError(f"data set {file} cannot be read: {error.strerror}") from None


def _packed(entry: dict[str, Any]) -> dict[str, Any]:
    """Replace lists of integers that fit int32 by arrays, which need a tenth of the memory."""
    for name, value in entry.items():
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            continue
        if value and min(value) >= -(2**31) and max(value) < 2**31:
            entry[name] = np.array(value, np.int32)
    return entry


JSON_SUFFIX, PARQUET_SUFFIX = ".json", ".parquet"
_OF_CHATS = ("conversations", "prompt")  # fields of files for other load generators
# Bytes that a gzip file may unpack to: per byte of the file, and in addition. gzip allows 1,032 per byte.
_MAX_GZIP, _SMALL_GZIP = 100, 1 << 20
_MAX_PARQUET, _SMALL_PARQUET = 200, 64 << 20  # the same for a column of a Parquet file


class Frame:
    """The columns of a data frame, by name."""

    def __init__(
        self,
        file: Path,
        columns: Sequence[str],
        values: Callable[[str], NDArray[Any]],
        max_bytes: int | None = None,
    ) -> None:
        """
        Args:
            values: Returns a column, shape [rows]. Cells may be objects, and several may be the same object.
            max_bytes: Limit on the size of all cells of a column together.
        """
        self.file, self.columns, self._values = file, tuple(columns), values
        self._max_bytes = max_bytes

    def integers(self, column: str) -> NDArray[np.int64]:
        """Return a column of integers, shape [rows]; ConfigError if the column holds anything else."""
        values = self._column(column)
        if values.dtype.kind not in "iu":
            raise ConfigError(f"{self.file}: column {column} holds {values.dtype}, not integers")
        return values.astype(np.int64)

    def texts(self, column: str) -> list[str]:
        """Return a column of texts; numbers become text. ConfigError names a row that holds anything else."""
        texts = []
        n_bytes = 0
        for row, value in enumerate(self._column(column).tolist()):
            if not isinstance(value, (str, int, float, np.number)) or isinstance(value, bool):
                raise ConfigError(f"{self.file}: row {row} of column {column} is {_kind_of(value)}, not text")
            texts.append(str(value))
            n_bytes += len(texts[-1])
            self._check(column, n_bytes)
        return texts

    def tokens(self, column: str) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return a column of lists or arrays: their lengths, shape [rows], and their integers, back to back.

        ConfigError names the row that holds anything else, or an integer that does not fit int32.
        """
        values = self._column(column)
        lengths = np.zeros(len(values), np.int64)
        packed = array("i")
        for row, cell in enumerate(values):
            before = len(packed)
            try:
                _take(cell, packed)
            except OverflowError:
                raise ConfigError(
                    f"{self.file}: row {row} of column {column} is not a list of tokens: "
                    "an integer does not fit int32"
                ) from None
            except TypeError as error:
                where = f"{self.file}: row {row} of column {column}"
                raise ConfigError(f"{where} is not a list of tokens: {error}") from None
            lengths[row] = len(packed) - before
            self._check(column, packed.itemsize * len(packed))
        return lengths, np.frombuffer(packed, np.int32) if packed else np.zeros(0, np.int32)

    def _check(self, column: str, n_bytes: int) -> None:
        if self._max_bytes is not None and n_bytes > self._max_bytes:
            raise ConfigError(f"{self.file}: column {column} expands to more than {self._max_bytes} bytes")

    def _column(self, name: str) -> NDArray[Any]:
        if name not in self.columns:
            if self.file.name.endswith(JSON_SUFFIX) and not {*_OF_CHATS}.isdisjoint(self.columns):
                raise ConfigError(not_lines(self.file, _OF_CHATS[0] in self.columns))
            available = f"the columns are: {', '.join(self.columns)}" if self.columns else "it is empty"
            raise ConfigError(f"{self.file}: no column {name}{nearest(name, self.columns)}; {available}")
        return self._values(name)


def read_frame(file: Path) -> Frame:
    """Read a data frame.

    The file is a pickle written by pandas (``.pkl``, ``.pkl.gz``; pickle protocol 2 to 5), Parquet or JSON
    (`json_rows`). Raises ConfigError if it cannot be read or is not a data frame, or without the library.
    """
    if file.name.endswith(JSON_SUFFIX):
        return _json_frame(file)
    if file.name.endswith(PARQUET_SUFFIX):
        return _parquet_frame(file)
    try:
        from mpillm.data.preprocessed import unpickler
    except ImportError as error:
        raise ConfigError(f"data set {file} needs {error.name}: pip install 'mpillm[datasets]'") from error
    stream = _opened(file)
    pickled = stream.getbuffer() if isinstance(stream, io.BytesIO) else stream
    try:
        data = unpickler.load(stream, pickled)
        max_bytes = unpickler.max_bytes(len(pickled))
        return Frame(file, tuple(data.columns), lambda name: data[name].to_numpy(), max_bytes)
    except unpickler.PickleError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (EOFError, struct.error) as error:
        raise ConfigError(f"{file}: truncated or damaged: its pickle ends before its data does") from error
    except (pickle.UnpicklingError, MemoryError, *DATA_ERRORS) as error:
        why = f"damaged, or not a data frame pickled by pandas 1 to 3 ({error})"
        raise ConfigError(f"{file}: {why}") from error


def _json_frame(file: Path) -> Frame:
    rows = list(json_rows(file))
    names = list(rows[0]) if rows else []
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys() and _OF_CHATS[0] not in row:
            raise ConfigError(
                f"{file}: row {number} has the fields {', '.join(row)}; row 0 has {', '.join(names)}"
            )

    def column(name: str) -> NDArray[Any]:
        cells = [row[name] for row in rows]
        if all(type(cell) is int and -(2**63) <= cell < 2**63 for cell in cells):
            return np.array(cells, np.int64)
        values = np.empty(len(cells), object)
        values[:] = cells
        return values

    return Frame(file, names, column)


def _parquet_frame(file: Path) -> Frame:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"data set {file} needs pyarrow: pip install 'mpillm[parquet]'") from None
    max_bytes = _MAX_PARQUET * file.stat().st_size + _SMALL_PARQUET if file.exists() else 0

    def column(name: str) -> NDArray[Any]:
        n_bytes, parts = 0, [np.zeros(0, object)]
        with named():
            for batch in table.iter_batches(1024, columns=[name]):
                n_bytes += batch.nbytes
                if n_bytes > max_bytes:
                    raise ConfigError(f"{file}: column {name} expands to more than {max_bytes} bytes")
                parts.append(batch.column(0).to_numpy(zero_copy_only=False))
        return np.concatenate(parts[1:] or parts)

    @contextlib.contextmanager
    def named() -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise ConfigError(f"{file}: damaged, or not Parquet: {error}") from None

    with named():
        table = pyarrow.parquet.ParquetFile(file)
        return Frame(file, table.schema_arrow.names, column, max_bytes)


def _opened(file: Path) -> mmap.mmap | io.BytesIO:
    """Return the file's bytes: mapped, or unpacked in memory if the file is compressed."""
    try:
        if file.name.endswith(".gz"):
            max_bytes = _MAX_GZIP * file.stat().st_size + _SMALL_GZIP
            unpacked = io.BytesIO()
            with gzip.open(file) as packed:
                while piece := packed.read(1 << 20):
                    unpacked.write(piece)
                    if unpacked.tell() > max_bytes:
                        raise ConfigError(f"{file}: refused: it unpacks to more than {max_bytes} bytes")
            unpacked.seek(0)
            return unpacked
        with file.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{file}: truncated, or not gzip: {error}") from None
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(f"{file} is empty") from None
    except OSError as error:
        raise ConfigError(f"data set {file} cannot be read: {error.strerror}") from None


def fits_int32(values: NDArray[Any]) -> bool:
    """Return whether all integers of an array fit int32."""
    fits = np.can_cast(values.dtype, np.int32) or not len(values)
    return fits or -(2**31) <= int(values.min()) <= int(values.max()) < 2**31


def _take(cell: Any, packed: array[int]) -> None:
    """Append the integers of `cell`. Raises OverflowError, or TypeError with the kind of the content."""
    if isinstance(cell, np.ndarray):
        if cell.dtype.kind not in "iu" or cell.ndim != 1:
            raise TypeError(f"it is {_kind_of(cell)}")
        if not fits_int32(cell):
            raise OverflowError
        packed.frombytes(cell.astype(np.int32).tobytes())
        return
    if not isinstance(cell, (list, tuple)):
        raise TypeError(f"it is {_kind_of(cell)}")
    for item in cell:
        if type(item) is array:  # the unpickler reads integers as arrays
            packed.extend(item)
        elif isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            packed.append(int(item))
        else:
            raise TypeError(f"it holds {_kind_of(item)}")


def _kind_of(value: Any) -> str:
    from mpillm.data.preprocessed.unpickler import kind_of

    return kind_of(value)
