"""Unpickler that accepts pandas' data frames and nothing else.

A pickle can call any function, and `pandas.read_pickle` allows it. A list of admitted classes is not enough,
because numpy and pandas do not check the state that they restore. A block with a wrong position, or an array
of objects with another dtype, ends pandas 3.1 with a segmentation fault. So this unpickler loads no object by
its name. The few calls that a frame needs go to the functions in `_CALLS`, which check their arguments.
pandas builds the frame from columns through its public API.

The base class is Python's `pickle._Unpickler`. The unpickler in C creates an object for each token: 40 bytes
for 3 in the file, so memory could not stay below 4 times the file's size. The class here reads all integers
of a list in one step, as an array, which is also faster.

A pickle can refer to one value repeatedly, so 75 bytes can expand to gigabytes. The size of all arguments and
results of calls is therefore limited by the size of the data.
"""

from __future__ import annotations

import mmap
import pickle
import re
import sys
from array import array
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mpillm.files import excerpt, n_values

# Names in frames of pandas 1.0 to 3, by module. Some classes exist in several modules.
_ADMITTED = {
    "builtins": {"slice", "bytes", "bytearray"},
    "__builtin__": {"slice", "bytes", "bytearray"},  # protocol 2's name of `builtins`
    "_codecs": {"encode"},  # how protocol 2 writes bytes
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
    "pandas": {"DataFrame", "Index", "RangeIndex", "StringDtype", "NA"},
    "pandas._libs.arrays": {"__pyx_unpickle_NDArrayBacked"},
    "pandas._libs.internals": {"_unpickle_block"},
    "pandas._libs.missing": {"NA"},
    "pandas.arrays": {"StringArray", "ArrowStringArray"},
    "pandas.core.arrays.string_": {"StringArray", "StringDtype"},
    "pandas.core.arrays.string_arrow": {"ArrowStringArray", "ArrowStringArrayNumpySemantics"},
    "pandas.core.frame": {"DataFrame"},
    "pandas.core.indexes.base": {"Index", "_new_Index"},
    "pandas.core.indexes.numeric": {"Int64Index"},
    "pandas.core.indexes.range": {"RangeIndex"},
    "pandas.core.internals.managers": {"BlockManager"},
    "pyarrow.lib": {"_restore_array", "chunked_array", "type_for_alias", "py_buffer"},
}
# Integers below 2**31 as a pickle writes them in a list. Most tokens take two bytes. Matching six of these
# together is 1.8 times as fast as one by one.
_INTEGERS = re.compile(rb"(?:M..M..M..M..M..M..|M..M..M..|M..|K.|J....)+", re.DOTALL)
_OPCODES = (
    *("PROTO", "STOP", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "POP", "POP_MARK"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT"),
    *("GLOBAL", "STACK_GLOBAL"),
)
_PYTHONS: dict[int, Callable[[Any], None]] = {**pickle._Unpickler.dispatch}
_DTYPE = re.compile(r"[biu][1248]|f(2|4|8|16)|c(8|16)|[mM]8|[SU][1-9]\d{0,5}|O8?")
# Bytes of memory that a data frame may take: per byte of its pickle, and in addition. A column of None takes
# 25 bytes per byte.
_MAX_BYTES, _SMALL = 64, 1 << 20
_NATIVE = {"|", "=", "<" if sys.byteorder == "little" else ">"}


class PickleError(Exception):
    """A pickle is damaged, or is not a data frame."""


class _Name(str):
    """The name of a class or function in a pickle, never the object itself."""


def load(stream: mmap.mmap | BytesIO, data: mmap.mmap | memoryview) -> pd.DataFrame:
    """Read the data frame in a pickle of protocol 2 to 5; `data` is the content of `stream`.

    A list in a cell holds its integers as ``array("i")``. Raises PickleError for any other content. For a
    damaged file, this may also raise another plain exception.
    """
    if len(data) < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise PickleError("not a pickle of protocol 2 to 5")
    reader = _Unpickler(stream, data)
    value = reader.load()
    if not isinstance(value, _PickledFrame):
        raise PickleError(f"holds {kind_of(value)}, not a pandas data frame")
    if value.manager is None:
        raise PickleError("damaged: its data frame has no blocks")
    return value.manager.frame(reader.spend)


def max_bytes(n_pickled: int) -> int:
    """Return the bytes that a data frame, or a column of it, may take if its pickle has `n_pickled` bytes."""
    return _MAX_BYTES * n_pickled + _SMALL


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        raise PickleError(f"refused: opcode 0x{opcode:02x} of the pickle, which no data frame needs")


class _Unpickler(pickle._Unpickler):
    # `pickle._Unpickler.load` sets these; its type stubs do not have them.
    stack: list[Any]
    metastack: list[list[Any]]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, stream: mmap.mmap | BytesIO, data: mmap.mmap | memoryview) -> None:
        super().__init__(stream)
        self._stream, self._data = stream, data
        self._left = max_bytes(len(data))

    def spend(self, n_bytes: int) -> None:
        """Count bytes before they are allocated. Raises PickleError above the limit for this pickle."""
        self._left -= n_bytes
        if self._left < 0:
            raise PickleError(
                f"refused: {len(self._data)} bytes of pickle expand to more than"
                f" {max_bytes(len(self._data))} bytes"
            )

    def _spend_on(self, value: Any, depth: int = 3) -> None:
        """Count the size of a call's arguments. A value in several containers counts several times."""
        if isinstance(value, (str, bytes)):
            self.spend(len(value))
        elif isinstance(value, np.ndarray):
            self.spend(value.nbytes)
        elif isinstance(value, (tuple, list, dict)) and depth:
            self.spend(8 * len(value))
            for item in value.values() if isinstance(value, dict) else value:
                self._spend_on(item, depth - 1)

    def find_class(self, module: str, name: str) -> _Name | None:
        if name not in _ADMITTED.get(module, ()):
            raise PickleError(f"refused: the pickle loads {module}.{name}, which no data frame needs")
        return _Name(name) if name != "NA" else None

    def _call(self) -> None:
        args = self.stack.pop()
        name = self.stack[-1]
        if not isinstance(name, _Name) or name not in _CALLS:
            raise PickleError(f"refused: the pickle calls {kind_of(name)}, which no data frame needs")
        self._spend_on(of_kind(args, tuple))
        self.stack[-1] = _CALLS[name](*args)

    def _build(self) -> None:
        state = self.stack.pop()
        value = self.stack[-1]
        if isinstance(value, np.ndarray):
            _fill(self.spend, value, *state)
        elif isinstance(value, np.dtype):
            if state[1] not in _NATIVE:
                raise PickleError("values in the other byte order")
        elif isinstance(value, (_PickledFrame, _Manager, _Texts)):
            value.build(state)
        elif value is not None:  # None stands for a StringDtype
            raise PickleError(f"damaged: {kind_of(value)} where an object belongs")

    def _mark(self) -> None:
        _PYTHONS[ord(pickle.MARK)](self)
        self._integers()

    def _begin_frame(self) -> None:
        """Skip the length of a frame (pickle protocol 4). A frame may begin inside a list."""
        self.read(8)
        self._integers()

    def _integers(self) -> None:
        """Read the next integers of a list as one array."""
        if self.metastack and self.metastack[-1] and type(self.metastack[-1][-1]) is list:
            match = _INTEGERS.match(self._data, self._stream.tell())
            if match:  # all opcodes in `match` are integers, so plain unpickling is safe
                self.stack.append(array("i", pickle.loads(b"(" + match[0] + b"l.")))
                self._stream.seek(match.end())

    def _bytearray(self) -> None:
        """Read a bytearray, not beyond the data. Python's method would allocate any length in the file."""
        self.stack.append(self.read(int.from_bytes(self.read(8), "little")))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        # Only text keys: hashing nested tuples can overflow the stack.
        of_kind(self.stack[-1], dict)[of_kind(key, str)] = value

    def _set_items(self) -> None:
        items = self.pop_mark()
        of_kind(self.stack[-1], dict).update(
            (of_kind(key, str), value) for key, value in zip(items[::2], items[1::2], strict=True)
        )

    dispatch = _Opcodes(
        {ord(getattr(pickle, name)): _PYTHONS[ord(getattr(pickle, name))] for name in _OPCODES}
        | {ord(pickle.REDUCE): _call, ord(pickle.NEWOBJ): _call, ord(pickle.BUILD): _build}
        | {ord(pickle.MARK): _mark, ord(pickle.FRAME): _begin_frame, ord(pickle.BYTEARRAY8): _bytearray}
        | {ord(pickle.SETITEM): _set_item, ord(pickle.SETITEMS): _set_items}
    )


class _PickledFrame:
    """A DataFrame before it is built."""

    manager: _Manager | None = None

    def build(self, state: Any) -> None:
        of_kind(state, dict)
        self.manager = of_kind(state.get("_mgr", state.get("_data")), _Manager)


class _Manager:
    """A BlockManager: blocks of values, [columns, rows], with column positions, and labels of both axes."""

    def __init__(self, blocks: Any = (), axes: Any = ()) -> None:
        self.blocks, self.axes = blocks, axes

    def build(self, state: Any) -> None:
        last = state[3]["0.14.1"]  # pandas 1.0 to 1.2 write the same state for several older versions
        self.blocks = [_block(block["values"], block["mgr_locs"]) for block in last["blocks"]]
        self.axes = last["axes"]

    def frame(self, spend: Callable[[int], None]) -> pd.DataFrame:
        labels, rows = self.axes
        labels = np.array([of_kind(label, str) for label in labels], object)
        parts = []
        for values, places in self.blocks:
            spend(8 * len(places) if isinstance(places, np.ndarray) else labels.nbytes)
            columns = labels[places]
            spend(values.nbytes)
            parts.append(
                pd.DataFrame(values.reshape(len(columns), len(rows)).T, columns=columns, dtype=values.dtype)
            )
        frame = pd.concat(parts, axis=1)
        if sorted(frame.columns) != sorted(set(labels)):
            raise PickleError("damaged, or two columns have the same name")
        return frame[labels]


class _Texts:
    """An array of one of pandas' string types."""

    values: NDArray[Any] | None = None

    def __init__(self, *_: Any) -> None: ...

    def build(self, state: Any) -> None:
        # The array's position depends on the version of pandas.
        parts = state.values() if isinstance(state, dict) else of_kind(state, tuple)
        self.values = next((part for part in parts if isinstance(part, np.ndarray)), None)


def _block(values: Any, places: Any, _: int = 2) -> tuple[NDArray[Any], Any]:
    return of_kind(values.values if isinstance(values, _Texts) else values, np.ndarray), of_kind(
        places, (slice, np.ndarray)
    )


def _index(kind: str, values: Any) -> Any:
    """Return the labels of an axis."""
    if kind == "RangeIndex":
        return range(values["start"], values["stop"], values["step"])
    return _block(values["data"], slice(None))[0]


def _fill(
    spend: Callable[[int], None], empty: Any, _: int, shape: Any, dtype: Any, is_fortran: Any, raw: Any
) -> None:
    """Fill an array with values. Check their number against the shape, because numpy does not."""
    if of_kind(dtype, np.dtype).hasobject:  # its integers have been read as arrays, as in any list
        spend(8 * sum(len(item) if type(item) is array else 1 for item in of_kind(raw, list)))
        raw = [one for item in raw for one in (item if type(item) is array else (item,))]
        size = 1
    else:
        size = dtype.itemsize
        spend(len(of_kind(raw, (list, bytes))))
    if empty.size or len(of_kind(raw, (list, bytes))) != size * n_values(of_kind(shape, tuple)):
        raise PickleError(f"damaged: {len(raw) // size} values in an array of shape {excerpt(shape)}")
    empty.__setstate__((1, shape, dtype, bool(is_fortran), raw))


def _dtype(name: str, *_: Any) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(name):
        raise PickleError(f"values of type {name}")
    return np.dtype(name)


def _bytes(of: Any = b"", _: str = "") -> bytes:
    """Return the bytes of ``bytes`` or ``bytearray``, which protocol 2 writes as text in Latin-1."""
    return of.encode("latin-1") if isinstance(of, str) else bytes(of_kind(of, bytes))


def _arrow_texts(data: Any) -> NDArray[Any]:
    """Return the texts of a pickled pyarrow array (Arrow's columns: validity bitmap, offsets, UTF-8)."""
    kind, length, n_null, offset, buffers = data[:5]
    width = {"string": "<i4", "large_string": "<i8"}.get(kind)
    if width is None:
        raise PickleError(f"values of Arrow's type {kind}")
    valid, ends, raw = buffers
    places = np.frombuffer(ends, width)[offset : offset + length + 1]
    if len(places) != of_kind(length, int) + 1:
        raise PickleError(f"damaged: {len(places)} ends of {length} texts")
    texts = np.empty(length, object)
    if (places[1:] < places[:-1]).any():
        raise PickleError("damaged: texts that overlap")
    is_valid = (
        np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[offset:]
        if n_null
        else np.ones(length)
    )
    for i, (begin, end) in enumerate(zip(places[:-1].tolist(), places[1:].tolist(), strict=True)):
        texts[i] = raw[begin:end].decode() if is_valid[i] else None
    return texts


# Functions that replace the calls in a pickle, by name.
_CALLS: dict[str, Callable[..., Any]] = {
    "DataFrame": _PickledFrame,
    "BlockManager": _Manager,
    "_unpickle_block": _block,
    "_new_Index": _index,
    "__pyx_unpickle_NDArrayBacked": _Texts,
    "StringArray": _Texts,
    "ArrowStringArray": _Texts,
    "ArrowStringArrayNumpySemantics": _Texts,
    "StringDtype": lambda *_: None,
    "_reconstruct": lambda *_: np.empty(0),
    "_frombuffer": lambda raw, dtype, shape, order: np.frombuffer(raw, dtype).reshape(shape, order=order),
    "scalar": lambda dtype, raw: np.frombuffer(raw, dtype)[0],
    "dtype": _dtype,
    "slice": lambda *ends: slice(*(of_kind(end, (int, type(None))) for end in ends)),
    "bytes": _bytes,
    "bytearray": _bytes,
    "encode": _bytes,
    "_restore_array": _arrow_texts,
    "chunked_array": lambda chunks, *_: np.concatenate([of_kind(chunk, np.ndarray) for chunk in chunks]),
    "type_for_alias": lambda alias: of_kind(alias, str),
    "py_buffer": lambda raw: of_kind(raw, bytes),
}


def of_kind(value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(kind.__name__.strip("_").lower() for kind in kinds)
        raise PickleError(f"damaged: {kind_of(value)} where a {expected} belongs")
    return value


def kind_of(value: Any) -> str:
    """Return the name of a value's kind, for a message."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, {value.ndim} dimensions"
    if isinstance(value, _Name):
        return str(value)
    if value is None:
        return "nothing"
    names: dict[type, str] = {
        str: "text",
        list: "a list",
        tuple: "a tuple",
        dict: "a dict",
        array: "integers",
    }
    return names.get(type(value), type(value).__name__.strip("_"))
