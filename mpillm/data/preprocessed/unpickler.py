"""Unpickles pandas' data frames and nothing else.

A pickle can call anything, and `pandas.read_pickle` lets it. A list of admitted classes is not enough: numpy
and pandas do not check the state that they restore. A block with a wrong place, or an array of objects whose
dtype does not say so, ends pandas 3.1 with a segmentation fault. So a name in the file stays a name here. The
few calls that a frame consists of go to the functions in `_CALLS`, which check their arguments; pandas builds
the frame from columns through its public API.

The base is Python's `pickle._Unpickler`, not the one in C, which makes an object of each token: 40 bytes for
3 in the file, so memory could not stay below 4 times the file's size. This one reads all integers of a list
at once, as an array, which is faster too.

A pickle can name what it holds again and again: 75 bytes can ask for gigabytes. So what calls are given, and
what they make, is counted, and bounded by the data's size.
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

# What frames of pandas 1.0 to 3 name, by module: classes have moved.
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
# Integers below 2**31 as a pickle writes them in a list. Most tokens take two bytes: matching six at a time
# is 1.8 times as fast.
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
# Bytes that a data frame may take for each of its pickle's, and besides. A column of None takes 25.
_MOST_BYTES, _SMALL = 64, 1 << 20
_NATIVE = {"|", "=", "<" if sys.byteorder == "little" else ">"}


class Refused(Exception):
    """The reason why a file is not read."""


class _Name(str):
    """The name of a class or function in a pickle, never the object itself."""


def load(stream: mmap.mmap | BytesIO, data: mmap.mmap | memoryview) -> pd.DataFrame:
    """Read the data frame in a pickle of protocol 2 to 5; `data` is all that `stream` reads.

    A list in a cell holds its integers as ``array("i")``. Raises Refused if the pickle holds something else
    or asks for what no data frame needs; a damaged file may raise any plain exception.
    """
    if len(data) < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise Refused("not a pickle of protocol 2 to 5")
    reader = _Unpickler(stream, data)
    made = reader.load()
    if not isinstance(made, _Frame):
        raise Refused(f"holds {kind_of(made)}, not a pandas data frame")
    if made.manager is None:
        raise Refused("damaged: its data frame has no blocks")
    return made.manager.frame(reader.spend)


def most_bytes(n_pickled: int) -> int:
    """Return the bytes that a data frame, or a column of it, may take; its pickle has `n_pickled`."""
    return _MOST_BYTES * n_pickled + _SMALL


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        raise Refused(f"refused: opcode 0x{opcode:02x} of the pickle, which no data frame needs")


class _Unpickler(pickle._Unpickler):
    # `pickle._Unpickler.load` sets these; its type stubs do not have them.
    stack: list[Any]
    metastack: list[list[Any]]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, stream: mmap.mmap | BytesIO, data: mmap.mmap | memoryview) -> None:
        super().__init__(stream)
        self._stream, self._data = stream, data
        self._left = most_bytes(len(data))

    def spend(self, n_bytes: int) -> None:
        """Count bytes that are about to be made. Raises Refused if they are too many for this pickle."""
        self._left -= n_bytes
        if self._left < 0:
            raise Refused(
                f"refused: {len(self._data)} bytes of pickle ask for more than"
                f" {most_bytes(len(self._data))} bytes"
            )

    def _spend_on(self, value: Any, depth: int = 3) -> None:
        """Count what a call is given: values in tuples, lists and dicts as often as they are there."""
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
            raise Refused(f"refused: the pickle asks for {module}.{name}, which no data frame needs")
        return _Name(name) if name != "NA" else None

    def _call(self) -> None:
        args = self.stack.pop()
        name = self.stack[-1]
        if not isinstance(name, _Name) or name not in _CALLS:
            raise Refused(f"refused: the pickle calls {kind_of(name)}, which no data frame needs")
        self._spend_on(of_kind(args, tuple))
        self.stack[-1] = _CALLS[name](*args)

    def _build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, np.ndarray):
            _fill(self.spend, made, *state)
        elif isinstance(made, np.dtype):
            if state[1] not in _NATIVE:
                raise Refused("values in the other byte order")
        elif isinstance(made, (_Frame, _Manager, _Texts)):
            made.build(state)
        elif made is not None:  # which is a StringDtype
            raise Refused(f"damaged: {kind_of(made)} where an object belongs")

    def _mark(self) -> None:
        _PYTHONS[ord(pickle.MARK)](self)
        self._integers()

    def _begin_frame(self) -> None:
        """Skip the length of a pickle's frame, which is not needed. A frame may begin inside a list."""
        self.read(8)
        self._integers()

    def _integers(self) -> None:
        """Read the integers that come next in a list as one array."""
        if self.metastack and self.metastack[-1] and type(self.metastack[-1][-1]) is list:
            found = _INTEGERS.match(self._data, self._stream.tell())
            if found:  # all its opcodes are integers, so plain unpickling is safe
                self.stack.append(array("i", pickle.loads(b"(" + found[0] + b"l.")))
                self._stream.seek(found.end())

    def _bytearray(self) -> None:
        """Make a bytearray bounded by the data: Python's own allocates whatever length the file claims."""
        self.stack.append(self.read(int.from_bytes(self.read(8), "little")))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        # Only texts: hashing nested tuples can overflow the stack.
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


class _Frame:
    """A DataFrame, until it is put together."""

    manager: _Manager | None = None

    def build(self, state: Any) -> None:
        of_kind(state, dict)
        self.manager = of_kind(state.get("_mgr", state.get("_data")), _Manager)


class _Manager:
    """A BlockManager: blocks of values, [columns, rows], their columns' places, labels of both axes."""

    def __init__(self, blocks: Any = (), axes: Any = ()) -> None:
        self.blocks, self.axes = blocks, axes

    def build(self, state: Any) -> None:
        last = state[3]["0.14.1"]  # pandas 1.0 to 1.2 write the same thing for several older versions
        self.blocks, self.axes = (
            [_block(block["values"], block["mgr_locs"]) for block in last["blocks"]],
            last["axes"],
        )

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
            raise Refused("damaged, or two columns have the same name")
        return frame[labels]


class _Texts:
    """An array of pandas' own for texts."""

    values: NDArray[Any] | None = None

    def __init__(self, *_: Any) -> None: ...

    def build(self, state: Any) -> None:
        # Where the array is depends on the version of pandas.
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
    spend: Callable[[int], None], made: Any, _: int, shape: Any, dtype: Any, is_fortran: Any, raw: Any
) -> None:
    """Give an array its values. numpy does not check their number against the shape."""
    if of_kind(dtype, np.dtype).hasobject:  # integers among them have become arrays, as in any list
        spend(8 * sum(len(item) if type(item) is array else 1 for item in of_kind(raw, list)))
        raw = [one for item in raw for one in (item if type(item) is array else (item,))]
        size = 1
    else:
        size = dtype.itemsize
        spend(len(of_kind(raw, (list, bytes))))
    if made.size or len(of_kind(raw, (list, bytes))) != size * n_values(of_kind(shape, tuple)):
        raise Refused(f"damaged: {len(raw) // size} values in an array of shape {excerpt(shape)}")
    made.__setstate__((1, shape, dtype, bool(is_fortran), raw))


def _dtype(name: str, *_: Any) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(name):
        raise Refused(f"values of type {name}")
    return np.dtype(name)


def _bytes(of: Any = b"", _: str = "") -> bytes:
    """``bytes``, ``bytearray``, and how protocol 2 writes them: as text in Latin-1."""
    return of.encode("latin-1") if isinstance(of, str) else bytes(of_kind(of, bytes))


def _arrow_texts(data: Any) -> NDArray[Any]:
    """Return the texts of a pickled pyarrow array (Arrow's columns: validity bitmap, offsets, UTF-8)."""
    kind, length, n_null, offset, buffers = data[:5]
    width = {"string": "<i4", "large_string": "<i8"}.get(kind)
    if width is None:
        raise Refused(f"values of Arrow's type {kind}")
    valid, ends, raw = buffers
    places = np.frombuffer(ends, width)[offset : offset + length + 1]
    if len(places) != of_kind(length, int) + 1:
        raise Refused(f"damaged: {len(places)} ends of {length} texts")
    texts = np.empty(length, object)
    if (places[1:] < places[:-1]).any():
        raise Refused("damaged: texts that overlap")
    there = (
        np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[offset:]
        if n_null
        else np.ones(length)
    )
    for i, (begin, end) in enumerate(zip(places[:-1].tolist(), places[1:].tolist(), strict=True)):
        texts[i] = raw[begin:end].decode() if there[i] else None
    return texts


# By their names: what the calls in a pickle do.
_CALLS: dict[str, Callable[..., Any]] = {
    "DataFrame": _Frame,
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
        wanted = " or ".join(kind.__name__.strip("_").lower() for kind in kinds)
        raise Refused(f"damaged: {kind_of(value)} where a {wanted} belongs")
    return value


def kind_of(value: Any) -> str:
    """Name the kind of a value, for a message."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, {value.ndim} dimensions"
    if isinstance(value, _Name):
        return str(value)
    names = {
        str: "text",
        type(None): "nothing",
        list: "a list",
        tuple: "a tuple",
        dict: "a dict",
        array: "integers",
    }
    return names.get(type(value), type(value).__name__.strip("_"))
