"""pandas' data frames in pickles, read without pandas: a column at a time, from the (memory-mapped) file."""

from __future__ import annotations

import contextlib
import gzip
import mmap
import re
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, nearest
from mpillm.preprocessed.opcodes import Call, Ints, Refused, Text, integers, kind_of, of_kind, run

_DTYPE = re.compile(r"[biuf][1248]|S\d+")


class Frame:
    """The columns of a data frame, by name; each is read from the file when it is asked for."""

    def __init__(self, file: Path, data: Any, columns: Mapping[str, tuple[Any, int]], n_rows: int) -> None:
        """`columns`: a block of values (see `_values`) and the row of it that is this column."""
        self.file, self._data, self._columns, self._n_rows = file, data, columns, n_rows

    def __len__(self) -> int:
        return self._n_rows

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def integers(self, column: str) -> NDArray[np.int64]:
        """A column of integers, shape [rows]; ConfigError if it holds anything else."""
        values = self._column(column)
        if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
            return values.astype(np.int64)
        raise ConfigError(f"{self.file}: column {column} is {kind_of(values)}, not integers")

    def texts(self, column: str) -> list[str]:
        """A column of texts; ConfigError naming the row that holds anything else. Numbers become text."""
        values = self._column(column)
        found = []
        for row in range(self._n_rows):
            value = values[row]
            if isinstance(value, Text) and not isinstance(value, Ints):
                with _damage(self.file):
                    value = self._data[value.start : value.end].decode("utf-8", "surrogatepass")
            elif isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
                value = str(value)
            if not isinstance(value, str):
                raise ConfigError(f"{self.file}: row {row} of column {column} is {kind_of(value)}, not text")
            found.append(value)
        return found

    def tokens(self, column: str) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """A column of lists (or arrays) of integers: their lengths, shape [rows], and all of them back to back.

        ConfigError naming the row that holds anything else, or an integer that is no int32.
        """
        values = self._column(column)
        lengths = np.zeros(self._n_rows, np.int64)
        packed = array("i")
        with _damage(self.file):
            for row in range(self._n_rows):
                before = len(packed)
                try:
                    self._take(values[row], packed)
                except (OverflowError, Refused) as error:
                    why = str(error) if isinstance(error, Refused) else "an integer of it is no int32"
                    raise ConfigError(f"{self.file}: row {row} of column {column} is no list of tokens: {why}") from None
                lengths[row] = len(packed) - before
        return lengths, np.frombuffer(packed, np.int32) if packed else np.zeros(0, np.int32)

    def _take(self, cell: Any, packed: array[int]) -> None:
        """Append the integers of one cell."""
        if isinstance(cell, (list, tuple)):
            for item in cell:
                if isinstance(item, Ints):
                    packed.fromlist(integers(item, self._data))
                elif type(item) is int:
                    packed.append(item)
                elif isinstance(item, Call) and item.name == "scalar":
                    packed.append(int(_scalar(item, self._data)))
                else:
                    raise Refused(f"it holds {kind_of(item)}")
            return
        values = _array(cell, self._data) if isinstance(cell, Call) else cell
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != 1:
            raise Refused(f"it is {kind_of(values)}")
        if len(values) and not -(2**31) <= int(values.min()) <= int(values.max()) < 2**31:
            raise OverflowError
        packed.frombytes(values.astype(np.int32).tobytes())

    def _column(self, name: str) -> Any:
        if name not in self._columns:
            raise ConfigError(f"{self.file}: no column {name}{nearest(name, self._columns)}; there are: {', '.join(self._columns)}")
        block, row = self._columns[name]
        with _damage(self.file):
            values = _values(block, self._data)
            if isinstance(values, tuple):  # several columns of objects
                shape, flat = values
                values = flat[row * shape[1] : (row + 1) * shape[1]] if len(shape) == 2 else flat
            elif isinstance(values, np.ndarray) and values.ndim == 2:
                values = values[row]
        if len(values) != self._n_rows:
            raise ConfigError(f"{self.file}: column {name} has {len(values)} rows, the index {self._n_rows}")
        return values


def read_frame(file: Path) -> Frame:
    """The data frame in a pickle that pandas has written (``.pkl``, ``.pkl.gz``; pickle protocol 2 to 5).

    ConfigError names the file and what is wrong: it can't be read, is truncated, is no pickle, holds something other than a data frame, or
    asks for a class or function that no data frame needs.
    """
    data = _contents(file)
    with _damage(file):
        return _frame(file, data, run(data))


@contextlib.contextmanager
def _damage(file: Path) -> Iterator[None]:
    """Whatever a file with other contents than a data frame's can lead to, as a ConfigError."""
    try:
        yield
    except Refused as error:
        raise ConfigError(f"{file}: {error}") from None
    except (IndexError, struct.error) as error:
        raise ConfigError(f"{file}: truncated or damaged: its pickle ends before its data does") from error
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{file}: damaged, or no data frame as pandas 1 to 3 pickle it ({error})") from error


def _contents(file: Path) -> Any:
    """The file's bytes: mapped, or in memory if they are compressed."""
    try:
        if file.name.endswith(".gz"):
            with gzip.open(file) as packed:
                return packed.read()
        with file.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{file}: truncated, or not gzip: {error}") from None
    except ValueError:
        raise ConfigError(f"{file} is empty") from None
    except OSError as error:
        raise ConfigError(f"data set {file} cannot be read: {error.strerror}") from None


def _frame(file: Path, data: Any, root: Any) -> Frame:
    if not isinstance(root, Call) or root.name != "DataFrame" or not isinstance(root.state, dict):
        raise Refused(f"holds {kind_of(root)}, not a pandas data frame")
    manager = root.state.get("_mgr", root.state.get("_data"))
    if not isinstance(manager, Call) or manager.name != "BlockManager":
        raise Refused("damaged: its data frame has no blocks")
    if manager.state is None:  # pandas 1.3 and later
        blocks, axes = manager.args
        placed = [(block.args[0], block.args[1]) for block in blocks]
    else:  # pandas 1.0 to 1.2 write the same thing for several versions; this is the last one
        last = manager.state[3]["0.14.1"]
        axes = last["axes"]
        placed = [(block["values"], block["mgr_locs"]) for block in last["blocks"]]
    items, index = _index(axes[0], data), _index(axes[1], data)
    columns: list[tuple[Any, int] | None] = [None] * len(items)
    for values, places in placed:
        numbers = range(*slice(*places.args).indices(len(items))) if places.name == "slice" else _array(places, data).tolist()
        for row, place in enumerate(numbers):
            columns[place] = values, row
    return Frame(file, data, {str(name): column for name, column in zip(items, columns, strict=True) if column is not None}, len(index))


def _index(node: Any, data: Any) -> Any:
    """The labels of an axis."""
    kind, values = of_kind(node, Call).args
    if kind == "RangeIndex":
        return range(values["start"], values["stop"], values["step"])
    labels = _values(values["data"], data)
    flat = labels[1] if isinstance(labels, tuple) else labels
    return [data[label.start : label.end].decode() if isinstance(label, Text) else label for label in flat]


def _values(block: Any, data: Any) -> Any:
    """A block's values: an array, (shape, flat list) of objects, or a list of texts."""
    if isinstance(block, Call) and block.name in ("ArrowStringArray", "ArrowStringArrayNumpySemantics"):
        state = block.state
        return _arrow_texts(state["_pa_array"] if "_pa_array" in state else state["_data"], data)
    if isinstance(block, Call) and block.name == "__pyx_unpickle_NDArrayBacked":  # of texts; its dtype comes first, or last
        block = next((part for part in block.state if isinstance(part, Call) and part.name != "StringDtype"), None)
    return _array(block, data)


def _array(node: Any, data: Any) -> Any:
    """A pickled numpy array: an array of numbers, or (shape, flat list) of objects."""
    of_kind(node, Call)
    if node.name == "_frombuffer":
        buffer, dtype, shape, order = node.args
        return np.frombuffer(_bytes(buffer, data), _dtype(dtype)).reshape(shape, order=order)
    if node.name != "_reconstruct":
        raise Refused(f"{kind_of(node)} where an array belongs")
    _, shape, dtype, is_fortran, raw = node.state
    if isinstance(raw, list):
        flat = [item for part in raw for item in (integers(part, data) if isinstance(part, Ints) else (part,))]
        if len(flat) != np.prod(shape, dtype=np.int64):
            raise ValueError(f"{len(flat)} objects in an array of shape {tuple(shape)}")
        return tuple(shape), flat
    return np.frombuffer(_bytes(raw, data), _dtype(dtype)).reshape(shape, order="F" if is_fortran else "C")


def _scalar(node: Call, data: Any) -> Any:
    dtype, raw = node.args
    return np.frombuffer(_bytes(raw, data), _dtype(dtype))[0]


def _bytes(node: Any, data: Any) -> bytes | memoryview:
    """Bytes, also as protocols 2 to 4 write them: ``_codecs.encode(text, "latin1")``, ``bytes()``, ``bytearray(bytes)``."""
    if isinstance(node, Call) and node.name in ("encode", "bytes", "bytearray"):
        node = node.args[0] if node.args else b""
        if isinstance(node, Text):
            node = data[node.start : node.end].decode()
        return node.encode("latin1") if isinstance(node, str) else _bytes(node, data)
    if not isinstance(node, (bytes, memoryview)):
        raise Refused(f"{kind_of(node)} where bytes belong")
    return node


def _dtype(node: Any) -> np.dtype[Any]:
    """numpy's pickled dtype: its name, and its byte order in the state; only plain numbers."""
    name, order = of_kind(node, Call).args[0], node.state[1]
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise Refused(f"values of type {name}")
    return np.dtype(name).newbyteorder(order if order in "<>" else "=")


def _arrow_texts(node: Any, data: Any) -> list[str | None]:
    """The texts of a pickled pyarrow array (Arrow's columnar format: a bitmap of what is there, offsets, UTF-8)."""
    if of_kind(node, Call).name == "chunked_array":
        return [text for chunk in node.args[0] for text in _arrow_texts(chunk, data)]
    kind, length, n_null, offset, buffers = node.args[0][:5]
    width = {"string": "<i4", "large_string": "<i8"}.get(kind.args[0])
    if node.name != "_restore_array" or width is None:
        raise Refused(f"values of Arrow's type {kind.args[0]}")
    valid, ends, text = (b"" if buffer is None else _bytes(buffer.args[0], data) for buffer in buffers)
    places = np.frombuffer(ends, width)[offset : offset + length + 1].tolist()
    there = [True] * length
    if n_null:
        there = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[offset : offset + length].astype(bool).tolist()
    raw = bytes(text)
    return [raw[a:b].decode() if is_there else None for a, b, is_there in zip(places, places[1:], there, strict=False)]
