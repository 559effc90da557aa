"""Pickled data frames: what pandas 1.2, 1.5, 2.2 and 3.1 have written, what else may be in such a file, and
what is refused."""

from __future__ import annotations

import gzip
import mmap
import os
import pickle
import pickletools
import re
import sys
from array import array
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy._core import numeric
from numpy._core.multiarray import _reconstruct, scalar
from pandas._libs.arrays import __pyx_unpickle_NDArrayBacked
from pandas._libs.internals import _unpickle_block
from pandas.core.indexes.base import _new_Index
from pandas.core.internals.managers import BlockManager

from disagg.errors import ConfigError
from mpillm.data.preprocessed import unpickler
from mpillm.data.preprocessed.frames import Frame, read_frame
from tests.helpers.data_frames import write_frame

FRAMES = Path(__file__).parents[2] / "data" / "frames"  # made by make.py there
NAMES = sorted(file.name for file in FRAMES.glob("*.pkl"))


def pick(values: list[Any], order: list[int]) -> list[Any]:
    return [values[i] for i in order]


@pytest.mark.parametrize("name", NAMES)
def test_what_pandas_wrote(name: str) -> None:
    """Files of protocols 2 to 5 are read, with columns of objects, of pandas' strings and of Arrow's, and
    each kind of index."""
    assert len(NAMES) == 20
    frame = read_frame(FRAMES / name)
    order: Any = [0, 2, 1] if "picked" in name else [2, 1, 0] if "reversed" in name else [0, 1, 2]
    assert frame.columns == (
        "id",
        "input",
        "tok_input",
        "array",
        "gt_output",
        "tok_input_length",
        "small",
        "rate",
    )
    assert frame.texts("id") == pick(["flan.1", "niv.2", "t0.3"], order)
    assert frame.texts("input") == pick(["naïve", "long " * 200, ""], order)
    assert frame.texts("gt_output") == pick(["14", "14", "2.5"], order)
    for column, rows in (
        ("tok_input", [[1, 300, 70000], list(range(2500)), [7]]),
        ("array", [[4, 5], [6], []]),
    ):
        lengths, tokens = frame.tokens(column)
        assert tokens.dtype == np.int32
        assert [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] == pick(rows, order)
    assert frame.integers("tok_input_length").tolist() == pick([3, 2500, 1], order)
    assert frame.integers("small").tolist() == pick([1, 2, 3], order)


def written(tmp_path: Path, **columns: Any) -> Path:
    write_frame(tmp_path / "frame.pkl", columns)
    return tmp_path / "frame.pkl"


def test_written_and_read(tmp_path: Path) -> None:
    rows = [[1], [2**31 - 1, 0], list(range(3000))]
    file = written(
        tmp_path, text=["a", "é" * 300, ""], tokens=rows, n=np.array([1, 2, 3]), same=[[1, 2], [3, 4], [5, 6]]
    )
    packed = tmp_path / "frame.pkl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    for path in (file, packed):
        frame = read_frame(path)
        assert frame.texts("text") == ["a", "é" * 300, ""]
        lengths, tokens = frame.tokens("tokens")
        assert lengths.tolist() == [1, 2, 3000] and tokens.tolist() == [
            token for row in rows for token in row
        ]
        assert frame.tokens("same")[1].tolist() == [1, 2, 3, 4, 5, 6]
        assert frame.integers("n").tolist() == [1, 2, 3]


def test_a_list_over_frames_of_the_pickle(tmp_path: Path) -> None:
    """A list of integers may go over the frames of protocol 4, which begin every 64 KB."""
    raw = pickle.dumps(np.random.default_rng(0).integers(300, 128000, 90000).tolist(), 4)
    frames = [at for op, _, at in pickletools.genops(raw) if op.name == "FRAME"]
    assert any(raw[at - 3 : at - 2] == b"M" or raw[at - 5 : at - 4] == b"J" for at in frames[1:] if at)
    tokens = np.random.default_rng(0).integers(0, 128000, 90000).tolist()
    lengths, found = read_frame(written(tmp_path, t=[tokens, [1]])).tokens("t")
    assert lengths.tolist() == [90000, 1] and found.tolist() == [*tokens, 1]


def test_lists_of_integers_become_arrays(tmp_path: Path) -> None:
    """Lists become arrays, because int objects would take 40 bytes a token, 13 times what the file has."""
    file = written(tmp_path, t=[list(range(300, 3300)), [400, 500]])
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for cell in unpickler.load(mapped, mapped)["t"]:
            assert {type(item) for item in cell} == {array}


class Does:
    """Pickles as a call and a state for what it makes."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.call = (function, args, state) if state is not None else (function, args)

    def __reduce__(self) -> Any:
        return self.call


class HasState:
    def __reduce__(self) -> Any:
        return OrderedDict, (), {"x": 1}


def glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


ATTACKS = {
    "os.system": (pickle.dumps(Does(os.system, "touch attacked"), 5), f"{os.system.__module__}.system"),
    "builtins.eval": (pickle.dumps(Does(eval, "1"), 4), "builtins.eval"),
    "protocol 2": (pickle.dumps(Does(eval, "1"), 2), "__builtin__.eval"),
    "getattr chain": (pickle.dumps(Does(getattr, Does(__import__, "os"), "system"), 4), "builtins.getattr"),
    "subclass": (pickle.dumps(HasState(), 5), "collections.OrderedDict"),
    "dotted name": (b"\x80\x04\x8c\x06pandas\x8c\x0eio.common.os.x\x93.", "pandas.io.common.os.x"),
    "dotted from numpy": (b"\x80\x04\x8c\x05numpy\x8c\x11ndarray.__class__\x93.", "numpy.ndarray.__class__"),
    "pandas' readers": (
        b"\x80\x02" + glob("pandas", "read_pickle") + b"X\x01\x00\x00\x00x\x85R.",
        "pandas.read_pickle",
    ),
    "pandas' eval": (
        b"\x80\x02" + glob("pandas.core.computation.eval", "eval") + b".",
        "pandas.core.computation.eval.eval",
    ),
    "numpy's loader": (b"\x80\x02" + glob("numpy", "load") + b".", "numpy.load"),
    "numpy's old door": (
        b"\x80\x02" + glob("numpy.testing._private.utils", "runstring") + b".",
        "numpy.testing._private.utils.runstring",
    ),
    "a function of ours": (
        b"\x80\x02" + glob("mpillm.data.preprocessed.frames", "read_frame") + b".",
        "mpillm.data.preprocessed.frames.read_frame",
    ),
    "numpy's files": (pickle.dumps(Does(np.fromfile, "secrets"), 4), "numpy.fromfile"),
    "calling a result": (
        b"\x80\x03" + glob("numpy", "dtype") + b"X\x02\x00\x00\x00i8\x85R)R.",
        "calls Int64DType",
    ),
    "calling an admitted class": (pickle.dumps(Does(pd.Index, ["a"]), 4), "calls Index"),
    "memory of any length": (pickle.dumps(Does(np.ndarray, (1 << 40,)), 4), "calls ndarray"),
    "INST": (b"\x80\x02(S'id'\nios\nsystem\n.", "opcode 0x53"),
    "OBJ": (b"\x80\x02(" + glob("numpy", "dtype") + b"o.", "opcode 0x6f"),
    "EXT1": (b"\x80\x02\x82\x01.", "opcode 0x82"),
    "BINPERSID": (b"\x80\x02K\x01Q.", "opcode 0x51"),
    "NEWOBJ_EX": (b"\x80\x04" + glob("numpy", "dtype") + b")}\x92.", "opcode 0x92"),
    "NEXT_BUFFER": (b"\x80\x05\x97.", "opcode 0x97"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, refused = ATTACKS[attack]
    file = tmp_path / "evil.pkl"
    file.write_bytes(raw)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        read_frame(file)
    assert str(error.value).startswith(f"{file}: refused: ") and refused in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["evil.pkl"]


RIGHT = {
    "values": np.array([[1, 2]]),
    "places": slice(0, 1, 1),
    "columns": pd.Index(["t"], dtype=object),
    "rows": pd.RangeIndex(2),
}


def blocks(**change: Any) -> bytes:
    """Return a data frame as pandas restores it, part of it changed."""
    one = RIGHT | change
    manager = Does(
        BlockManager, (Does(_unpickle_block, one["values"], one["places"], 2),), [one["columns"], one["rows"]]
    )
    return pickle.dumps(Does(pd.DataFrame, state={"_mgr": manager, "_typ": "dataframe"}), 4)


def values(shape: Any, dtype: Any, raw: Any) -> Does:
    return Does(_reconstruct, np.ndarray, (0,), b"b", state=(1, shape, dtype, False, raw))


def ends(*places: int) -> bytes:
    """Return where texts end, as Arrow has it."""
    return b"".join(place.to_bytes(8, "little") for place in places)


# numpy would not know that it holds objects
FLAGLESS = Does(np.dtype, "O8", False, True, state=(3, "|", None, None, None, -1, -1, 0))

INT64 = pickle.dumps(np.dtype(np.int64), 4)[11:-1]

# What numpy and pandas believe without a look: most of these crash the process, or make it follow addresses
# in the file.
STATES = {
    "a block far outside": blocks(places=slice(10**6, 10**6 + 1, 1)),
    "a block before the first": blocks(places=np.array([-(10**7)])),
    "no step": blocks(places=slice(0, 1, 0)),
    "places that are no numbers": blocks(places=np.array([0.5])),
    "fewer rows": blocks(rows=pd.RangeIndex(10**15)),
    "rows without end": blocks(rows=Does(_new_Index, pd.RangeIndex, {"start": 0, "stop": 10**30, "step": 1})),
    "a column without values": blocks(columns=pd.Index(["t", "u"], dtype=object)),
    "columns of one name": blocks(
        columns=pd.Index(["t", "t"], dtype=object), values=np.array([[1, 2], [3, 4]]), places=slice(0, 2, 1)
    ),
    "labels that are no texts": blocks(columns=pd.Index([("t",)], dtype=object, tupleize_cols=False)),
    "objects where values belong": blocks(values=[1, 2]),
    "fewer objects than the shape has": blocks(values=values((1, 2), np.dtype(object), ["a"])),
    "fewer bytes than the shape has": blocks(values=values((1, 2), np.dtype(int), b"12345678")),
    "a shape below 0": blocks(values=values((-1, -2), np.dtype(int), bytes(16))),
    "addresses for objects": blocks(values=values((1, 2), FLAGLESS, b"AAAAAAAABBBBBBBB")),
    "addresses in a buffer": blocks(
        values=Does(vars(numeric)["_frombuffer"], b"AAAAAAAABBBBBBBB", FLAGLESS, (1, 2), "C")
    ),
    "an address as a scalar": blocks(values=Does(scalar, FLAGLESS, b"AAAAAAAA")),
    "an array filled twice": pickle.dumps(np.arange(3), 4)[:-1]
    + b"(K\x01K\x01\x85"
    + INT64
    + b"\x89C\x0812345678tb.",
    "a class changed": b"\x80\x04" + glob("pandas", "DataFrame") + b"N}X\x01\x00\x00\x00aNs\x86b.",
    "a name made by a call": b"\x80\x04" + glob("builtins", "bytes") + b")R\x8c\x06system\x93.",
    "texts without values": blocks(
        values=Does(__pyx_unpickle_NDArrayBacked, pd.arrays.StringArray, 82904607, None)
    ),
    "Arrow's texts that overlap": (FRAMES / "pandas3.1-string.pkl")
    .read_bytes()
    .replace(ends(6, 11), ends(12, 2)),
    "nested keys": b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.",
    "nested keys at once": b"\x80\x04}()" + b"\x85" * 1_000_000 + b"Nu.",
    "nested labels": b"\x80\x04)" + b"\x85" * 1_000_000 + b".",
    "marks without an end": b"\x80\x04" + b"(" * 1_000_000,
    "lists in lists": b"\x80\x04" + b"](" * 500_000 + b"e" * 500_000 + b".",
    "a buffer of any length": b"\x80\x05\x96" + (1 << 60).to_bytes(8, "little") + b"abc.",
}


@pytest.mark.long
@pytest.mark.parametrize("state", STATES)
def test_states_without_checks(state: str, tmp_path: Path) -> None:
    file = tmp_path / "evil.pkl"
    file.write_bytes(STATES[state])
    with pytest.raises(ConfigError) as error:
        read_all(read_frame(file))
    assert str(error.value).startswith(f"{file}: ")


def test_without_a_change_it_is_a_frame(tmp_path: Path) -> None:
    (tmp_path / "good.pkl").write_bytes(blocks())
    assert read_frame(tmp_path / "good.pkl").integers("t").tolist() == [1, 2]


def test_without_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpillm.data.preprocessed.unpickler")
    monkeypatch.delattr("mpillm.data.preprocessed.unpickler")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"x\.pkl needs pandas: pip install 'mpillm\[datasets\]'"):
        read_frame(tmp_path / "x.pkl")


def test_an_attack_in_the_place_of_a_cell(tmp_path: Path) -> None:
    file = tmp_path / "frame.pkl"
    write_frame(file, {"t": [Does(os.system, "true"), [2]]})
    with pytest.raises(
        ConfigError,
        match=r"refused: the pickle loads posix\.system|refused: the pickle loads nt\.system",
    ):
        read_frame(file)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty"),
        (b"hello world", "not a pickle of protocol 2 to 5"),
        (b"(lp0\n.", "not a pickle of protocol 2 to 5"),
        (pickle.dumps([1, 2], 4), "holds a list, not a pandas data frame"),
        (pickle.dumps(np.arange(3), 4), "holds an array of int64, 1 dimensions, not a pandas data frame"),
        (pickle.dumps({"tok_input": [[1]]}, 4), "holds a dict, not a pandas data frame"),
        (
            b"\x80\x03" + glob("pandas.core.frame", "DataFrame") + b")\x81}b.",
            "damaged: nothing where a manager belongs",
        ),
        (b"\x80\x03" + glob("pandas.core.frame", "DataFrame") + b")\x81.", "its data frame has no blocks"),
        (b"\x80\x04h\x07.", "Memo value not found at index 7"),
        (b"\x80\x04K\x01a.", "damaged"),
        (b"\x80\x04N]a.", "damaged"),
        (b"\x80\x04K\x01K\x02b.", "damaged: int where an object belongs"),
        (b"\x80\x04X\xff\xff\xff\xffabc.", "truncated or damaged"),
        (b"\x80\x04e.", "damaged"),
        (b"\x80\x04\x8c\x01\xff.", "damaged"),
    ],
)
def test_no_frame(raw: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.pkl"
    file.write_bytes(raw)
    with pytest.raises(ConfigError) as error:
        read_frame(file)
    assert str(file) in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("name", ["pandas1.5.pkl", "pandas2.2-reversed.pkl", "pandas3.1-string.pkl"])
def test_truncated_anywhere_or_changed(name: str, tmp_path: Path) -> None:
    """Whatever is cut off or turned over gives a frame with these rows, or a ConfigError that names the
    file."""
    whole = (FRAMES / name).read_bytes()
    random = np.random.default_rng(0)
    file = tmp_path / "cut.pkl"
    for place in random.integers(0, len(whole), 100).tolist():
        file.write_bytes(whole[:place])
        with pytest.raises(ConfigError) as error:
            read_frame(file)
        assert str(file) in str(error.value)
        changed = bytearray(whole)
        changed[place] ^= int(random.integers(1, 256))
        file.write_bytes(changed)
        try:
            read_all(read_frame(file))
        except ConfigError as wrong:
            assert str(file) in str(wrong)


def read_all(frame: Frame) -> None:
    for column in frame.columns:
        for read in (frame.texts, frame.tokens, frame.integers):
            try:
                read(column)
            except ConfigError as wrong:
                assert str(frame.file) in str(wrong)


def test_gzip_that_is_cut_off(tmp_path: Path) -> None:
    file = written(tmp_path, t=[[1]])
    packed = tmp_path / "frame.pkl.gz"
    for raw in (gzip.compress(file.read_bytes())[:-12], file.read_bytes()):
        packed.write_bytes(raw)
        with pytest.raises(ConfigError, match="truncated, or not gzip"):
            read_frame(packed)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["text", [1]], r"row 0 of column t is not a list of tokens: it is text"),
        ([[1], ["a"]], r"row 1 of column t is not a list of tokens: it holds text"),
        ([[1], [1.5]], r"row 1 of column t is not a list of tokens: it holds float"),
        ([[1], None], r"row 1 of column t is not a list of tokens: it is nothing"),
        ([[1], [2**40]], r"row 1 of column t is not a list of tokens: an integer does not fit int32"),
        (
            [[1], np.array([2**31])],
            r"row 1 of column t is not a list of tokens: an integer does not fit int32",
        ),
        ([[1], np.array([1.5])], r"row 1 of column t is not a list of tokens: it is an array of float64"),
        ([[1], [[2]]], r"row 1 of column t is not a list of tokens: it holds a list"),
        (np.array([1, 2]), r"row 0 of column t is not a list of tokens"),
    ],
)
def test_wrong_cells(values: Any, message: str, tmp_path: Path) -> None:
    frame = read_frame(written(tmp_path, t=values))
    with pytest.raises(ConfigError, match=f"^{re.escape(str(frame.file))}: {message}"):
        frame.tokens("t")


def test_wrong_columns(tmp_path: Path) -> None:
    frame = read_frame(written(tmp_path, tok_input=[[1]], text=["a"], ratio=np.array([1.5])))
    for read, message in (
        (
            lambda: frame.tokens("tok_inputs"),
            r"no column tok_inputs \(did you mean 'tok_input'\?\); the columns are: tok_input, text, ratio",
        ),
        (lambda: frame.integers("ratio"), "column ratio holds float64, not integers"),
        (lambda: frame.integers("text"), "column text holds object, not integers"),
        (lambda: frame.texts("tok_input"), "row 0 of column tok_input is a list, not text"),
    ):
        with pytest.raises(ConfigError, match=message):
            read()
