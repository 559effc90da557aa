"""Writes data frames as pandas pickles them, without pandas: for scaled-down workloads, benchmarks and tests."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_frame(file: Path, columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> None:
    """Write columns (texts, lists of integers, or a numpy array) as a data frame that pandas 1.3 and later reads back.

    The pickle is put together from protocol 3's opcodes, for want of pandas' classes: for test data and scaled-down workloads.
    """

    def name(module: str, what: str) -> bytes:
        return f"c{module}\n{what}\n".encode()

    def plain(value: Any) -> bytes:  # its memo may be overwritten by the next one's: nothing refers to it from outside
        return pickle.dumps(value, 3)[2:-1]

    def call(what: bytes, *args: bytes) -> bytes:
        return what + b"(" + b"".join(args) + b"tR"

    def labels(values: Sequence[str]) -> bytes:
        index = name("pandas.core.indexes.base", "Index")
        return call(name("pandas.core.indexes.base", "_new_Index"), index, plain({"data": np.array(values, object), "name": None}))

    n_rows = len(next(iter(columns.values())))
    blocks = b""
    for place, values in enumerate(columns.values()):
        if isinstance(values, np.ndarray):
            cells: NDArray[Any] = values.reshape(1, n_rows)
        else:
            cells = np.empty((1, n_rows), object)
            for row, value in enumerate(values):  # one by one: numpy would spread lists of one length
                cells[0, row] = value
        blocks += call(name("pandas._libs.internals", "_unpickle_block"), plain(cells), plain(slice(place, place + 1, 1)), plain(2))
    rows = call(
        name("pandas.core.indexes.base", "_new_Index"),
        name("pandas.core.indexes.range", "RangeIndex"),
        plain({"name": None, "start": 0, "stop": n_rows, "step": 1}),
    )
    manager = call(
        name("pandas.core.internals.managers", "BlockManager"), b"(" + blocks + b"t", b"](" + labels(list(columns)) + rows + b"e"
    )
    state = (
        b"}("
        + plain("_mgr")
        + manager
        + b"".join(
            plain(key) + plain(value)
            for key, value in {"_typ": "dataframe", "_metadata": [], "attrs": {}, "_flags": {"allows_duplicate_labels": True}}.items()
        )
        + b"u"
    )
    file.write_bytes(b"\x80\x03" + name("pandas.core.frame", "DataFrame") + b")\x81" + state + b"b.")
