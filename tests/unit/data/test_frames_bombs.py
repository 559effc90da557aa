"""Small files that ask for much memory: refused, with little memory taken."""

from __future__ import annotations

import gzip
import os
import resource
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.preprocessed.frames import read_frame
from tests.helpers.data_frames import write_frame

MOST = 64 << 20


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Fail a test in which Python and numpy take much; end an allocation that would fill the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (2 << 30), before[1]))
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, before)


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module: str, of: str) -> bytes:
    return text(module) + text(of) + b"\x93"


def integer(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little")


def array_of(kind: str, size: int, raw: bytes) -> bytes:
    """An array of `size` as numpy pickles it; `raw`: what makes its values."""
    dtype = name("numpy", "dtype") + text(kind) + b"\x85R"
    dtype += b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    made = name("numpy._core.multiarray", "_reconstruct") + b")R"
    return made + b"(K\x01" + integer(size) + b"\x85" + dtype + b"\x89" + raw + b"tb"


def doubling(times: int) -> bytes:
    """A chunk of Arrow's that is joined with itself, and that with itself, and so on."""
    made = array_of("i1", 1 << 16, b"B" + struct.pack("<I", 1 << 16) + bytes(1 << 16)) + b"q\x000"
    for i in range(times):
        twice = b"](" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"e"
        made += name("pyarrow.lib", "chunked_array") + twice + b"\x85Rq" + bytes([i + 1]) + b"0"
    return made + b"N"


def bombs() -> dict[str, bytes]:
    no_texts = b"N" + b"C\x08" + bytes(8) + b"C\x00" + b"\x87"
    arrow = name("pyarrow.lib", "_restore_array")
    integers = b"](" + b"K\x01" * 20_000 + b"eq\x000"
    again = b"](" + b"h\x00" * 20_000 + b"e"
    return {
        "doubling": doubling(14),
        "more texts than ends": arrow
        + b"("
        + text("string")
        + integer(1 << 27)
        + b"K\x00K\x00"
        + no_texts
        + b"t\x85R",
        "a shape whose product is long": array_of("i1", 1, b"C\x00").replace(
            integer(1) + b"\x85",
            b"\x8a\xff" + b"\x7f" * 255 + b"q\x000(" + b"h\x00" * 100_000 + b"t",
        ),
        "items of no bytes": array_of("S0", 1 << 40, b"C\x00"),
        "bytes again and again": b"B"
        + struct.pack("<I", 1 << 16)
        + bytes(1 << 16)
        + b"q\x000"
        + b"]("
        + (name("builtins", "bytes") + b"h\x00\x85R") * 5_000
        + b"e",
        "a text encoded again and again": b"X"
        + struct.pack("<I", 1 << 16)
        + b"a" * (1 << 16)
        + b"q\x000"
        + b"]("
        + (name("_codecs", "encode") + b"h\x00" + text("latin1") + b"\x86R") * 5_000
        + b"e",
        "lists of lists": integers + again,
    }


@pytest.mark.parametrize("bomb", bombs())
def test_a_small_pickle_takes_little_memory(bomb: str, tmp_path: Path) -> None:
    file = tmp_path / "frame.pkl"
    file.write_bytes(b"\x80\x04" + bombs()[bomb] + b".")
    with pytest.raises(ConfigError, match=r"frame\.pkl: (refused|damaged|values of type|holds)"):
        read_frame(file)


@pytest.mark.parametrize("of", ["tokens", "texts"])
def test_a_cell_in_many_rows(of: str, tmp_path: Path) -> None:
    """Rows that are the same list, or text, are one in the file; they are read as long as they are few."""
    rows = 4 if of == "texts" else 3
    for n, refused in ((rows, False), (60_000, True)):
        cell = [1] * 20_000 if of == "tokens" else "a" * 40_000
        write_frame(tmp_path / "frame.pkl", {"column": [cell] * n})
        frame = read_frame(tmp_path / "frame.pkl")
        if refused:
            with pytest.raises(ConfigError, match="column column expands to more than"):
                getattr(frame, of)("column")
        else:
            assert len(getattr(frame, of)("column")[0]) == (n if of == "tokens" else len(cell))


@pytest.mark.long
def test_gzip_of_zeros(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "frame.pkl.gz", "wb") as packed:
        for _ in range(256):
            packed.write(bytes(1 << 20))
    with pytest.raises(ConfigError, match="refused: it unpacks to more than"):
        read_frame(tmp_path / "frame.pkl.gz")


@pytest.mark.long
def test_frames_of_little_are_read(tmp_path: Path) -> None:
    """Columns that a pickle writes in a byte or two a row are not taken for bombs."""
    n = 300_000
    columns: dict[str, Any] = {"none": [None] * n, "same": ["gpt4"] * n, "n": np.zeros(n, np.int8)}
    write_frame(tmp_path / "frame.pkl", columns)
    assert len(read_frame(tmp_path / "frame.pkl").texts("same")) == n
