"""A pickle's opcodes, run only as far as they build data: nothing that a file names is imported or called.

A pickle is a program that can call anything. Here a global is a name on a list of what pandas, numpy and pyarrow write, a call is noted
down as a `Call` and looked at afterwards (`frames`), and everything else is refused by name. Python's `pickletools` describes the opcodes.
Long texts and lists of integers stay in the file as places until somebody asks for them, so what nobody asks for costs no memory.
"""

from __future__ import annotations

import pickle
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

# What pandas 1.0 to 3 (whose classes have moved between modules), numpy and pyarrow name when they pickle a data frame, by what it is here.
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric", "numpy")
_PANDAS = (
    "pandas",
    "pandas.arrays",
    "pandas._libs.arrays",
    "pandas._libs.internals",
    "pandas._libs.missing",
    "pandas.core.frame",
    "pandas.core.indexes.base",
    "pandas.core.indexes.numeric",
    "pandas.core.indexes.range",
    "pandas.core.internals.blocks",
    "pandas.core.internals.managers",
    "pandas.core.arrays.string_",
    "pandas.core.arrays.string_arrow",
)
_ADMITTED: dict[str, frozenset[str]] = {
    **dict.fromkeys(_NUMPY, frozenset({"_reconstruct", "_frombuffer", "scalar", "ndarray", "dtype"})),
    **dict.fromkeys(
        _PANDAS,
        frozenset(
            {"DataFrame", "BlockManager", "_unpickle_block", "_new_Index", "Index", "RangeIndex", "Int64Index", "NA"}
            | {"StringArray", "ArrowStringArray", "ArrowStringArrayNumpySemantics", "StringDtype", "__pyx_unpickle_NDArrayBacked"}
        ),
    ),
    "pyarrow.lib": frozenset({"_restore_array", "chunked_array", "type_for_alias", "py_buffer"}),
    **dict.fromkeys(("builtins", "__builtin__"), frozenset({"slice", "bytes", "bytearray"})),  # the latter is protocol 2's name
    "_codecs": frozenset({"encode"}),  # how protocol 2 writes bytes
}
# Integers below 2**31, as a pickle writes them in a list. Most tokens take two bytes: by sixes they are passed 1.8 times as fast.
_INTS = re.compile(rb"(?:M..M..M..M..M..M..|M..M..M..|M..|K.|J....)+", re.DOTALL)
_INT, _UINT, _FLOAT = (struct.Struct(code).unpack_from for code in ("<i", "<I", ">d"))
_SHORT_TEXT = 256  # bytes; shorter texts are decoded at once


class Refused(Exception):
    """Why this file is not read; `read_frame` adds its name."""


class Global(str):
    """The name of a class or function, without its module: never the thing itself."""


@dataclass(slots=True)
class Call:
    """A call that the pickle asks for, not made."""

    name: str
    args: Any
    state: Any = None


class Text:
    """A text that is still in the file."""

    __slots__ = ("end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end


class Ints(Text):
    """Integers in a list, of which the file holds the opcodes."""

    __slots__ = ()


_MARK = object()


def run(data: Any) -> Any:
    """What the pickle builds: texts, numbers, lists, tuples, dicts, and `Call`s."""
    if len(data) < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise Refused("not a pickle of protocol 2 to 5")
    size, position = len(data), 2
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    ints = _INTS.match

    def take(n: int, width: int) -> tuple[int, int]:
        """Where the `n` bytes behind a length of `width` bytes begin and end."""
        start = position + width
        if n < 0 or start + n > size:
            raise IndexError
        return start, start + n

    def since_mark() -> list[Any]:
        for i in range(len(stack) - 1, -1, -1):
            if stack[i] is _MARK:
                items = stack[i + 1 :]
                del stack[i:]
                return items
        raise IndexError

    while True:
        op = data[position]
        position += 1
        if op == 0x94:  # MEMOIZE; the commonest come first
            memo[len(memo)] = stack[-1]
        elif op == 0x72:  # LONG_BINPUT
            memo[_UINT(data, position)[0]] = stack[-1]
            position += 4
        elif op == 0x58 or op == 0x8C:  # BINUNICODE, SHORT_BINUNICODE
            start = position + (4 if op == 0x58 else 1)
            end = start + int.from_bytes(data[position:start], "little")
            if end > size:
                raise IndexError
            stack.append(Text(start, end) if end - start >= _SHORT_TEXT else data[start:end].decode("utf-8", "surrogatepass"))
            position = end
        elif op == 0x28:  # MARK
            is_list = bool(stack) and type(stack[-1]) is list
            stack.append(_MARK)
            while is_list and (run := ints(data, position)):
                stack.append(Ints(position, run.end()))
                position = run.end()
                if data[position] != 0x95:  # a frame may begin in the middle of a list
                    break
                position += 9
        elif op == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif op == 0x65:  # APPENDS
            items = since_mark()
            of_kind(stack[-1], list).extend(items)
        elif op == 0x4B:  # BININT1
            stack.append(data[position])
            position += 1
        elif op == 0x4D:  # BININT2
            stack.append(data[position] | data[position + 1] << 8)
            position += 2
        elif op == 0x4A:  # BININT
            stack.append(_INT(data, position)[0])
            position += 4
        elif op == 0x71:  # BINPUT
            memo[data[position]] = stack[-1]
            position += 1
        elif op == 0x68:  # BINGET
            stack.append(_remembered(memo, data[position]))
            position += 1
        elif op == 0x6A:  # LONG_BINGET
            stack.append(_remembered(memo, _UINT(data, position)[0]))
            position += 4
        elif op == 0x95:  # FRAME
            position += 8
        elif op == 0x61:  # APPEND
            item = stack.pop()
            of_kind(stack[-1], list).append(item)
        elif op == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif 0x85 <= op <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
            n = op - 0x84
            if len(stack) < n:
                raise IndexError
            stack[-n:] = [tuple(stack[-n:])]
        elif op == 0x74:  # TUPLE
            stack.append(tuple(since_mark()))
        elif op == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif op == 0x75:  # SETITEMS
            items = since_mark()
            of_kind(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        elif op == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            of_kind(stack[-1], dict)[key] = value
        elif op == 0x4E:  # NONE
            stack.append(None)
        elif op == 0x88 or op == 0x89:  # NEWTRUE, NEWFALSE
            stack.append(op == 0x88)
        elif op == 0x47:  # BINFLOAT
            stack.append(_FLOAT(data, position)[0])
            position += 8
        elif op == 0x8A:  # LONG1
            start, end = take(data[position], 1)
            stack.append(int.from_bytes(data[start:end], "little", signed=True))
            position = end
        elif op in (0x42, 0x43, 0x8E, 0x96):  # BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8
            width = {0x42: 4, 0x43: 1}.get(op, 8)
            start, end = take(int.from_bytes(data[position : position + width], "little"), width)
            stack.append(memoryview(data)[start:end])
            position = end
        elif op == 0x8D:  # BINUNICODE8
            start, end = take(int.from_bytes(data[position : position + 8], "little"), 8)
            stack.append(Text(start, end))
            position = end
        elif op == 0x63:  # GLOBAL
            end = data.find(b"\n", data.find(b"\n", position) + 1)
            if end < position:
                raise IndexError
            module, name = data[position:end].decode("utf-8", "replace").split("\n")
            stack.append(_admitted(module, name))
            position = end + 1
        elif op == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            stack.append(_admitted(module, name))
        elif op == 0x52 or op == 0x81:  # REDUCE, NEWOBJ
            args, called = stack.pop(), stack.pop()
            if not isinstance(called, Global):
                raise Refused(f"refused: the pickle calls {kind_of(called)}, which is no class or function that a data frame needs")
            stack.append(Call(str(called), of_kind(args, tuple)))
        elif op == 0x62:  # BUILD
            state = stack.pop()
            of_kind(stack[-1], Call).state = state
        elif op == 0x2E:  # STOP
            return stack.pop()
        else:
            raise Refused(f"refused: opcode 0x{op:02x} of the pickle at byte {position - 1}, which no data frame needs")


def _remembered(memo: dict[int, Any], index: int) -> Any:
    if index not in memo:
        raise Refused(f"damaged: it refers to object {index}, which it has not defined")
    return memo[index]


def _admitted(module: Any, name: Any) -> Global:
    if not isinstance(module, str) or not isinstance(name, str) or name not in _ADMITTED.get(module, ()):
        what = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "something without a plain name"
        raise Refused(f"refused: the pickle asks for {what}, which no data frame needs")
    return Global(name)


def of_kind(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise Refused(f"damaged: {kind_of(value)} where a {kind.__name__.strip('_').lower()} belongs")
    return value


def kind_of(value: Any) -> str:
    """What a value is, for a message."""
    if isinstance(value, Call):
        return f"a {value.name}"
    if isinstance(value, Global):
        return f"the name {value}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, {value.ndim} dimensions"
    names = {str: "text", Text: "text", Ints: "integers", type(None): "nothing", list: "a list", tuple: "objects", dict: "a dict"}
    return names.get(type(value), type(value).__name__)


def integers(run: Ints, data: Any) -> list[int]:
    """Unpickling is safe here: `_INTS` has matched every opcode of the run."""
    integers: list[int] = pickle.loads(b"(" + data[run.start : run.end] + b"l.")
    return integers
