"""Pickled data frames: what pandas 1.5, 2.2 and 3.1 have written, what else may be in such a file, and what is refused."""

from __future__ import annotations

import gzip
import os
import pickle
import pickletools
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.preprocessed.frames import Frame, read_frame
from mpillm.preprocessed.write import write_frame

FRAMES = Path(__file__).parents[1] / "data" / "frames"  # made by make.py there
NAMES = sorted(file.name for file in FRAMES.glob("*.pkl"))


@pytest.mark.parametrize("name", NAMES)
def test_what_pandas_wrote(name: str) -> None:
    """Every version, protocol 2, 4 and 5, columns of objects, of pandas' strings and of Arrow's."""
    assert len(NAMES) == 9
    frame = read_frame(FRAMES / name)
    order = slice(None, None, -1 if "reversed" in name else 1)
    assert frame.columns == ("id", "input", "tok_input", "array", "gt_output", "tok_input_length", "small", "rate")
    assert len(frame) == 3
    assert frame.texts("id") == ["flan.1", "niv.2", "t0.3"][order]
    assert frame.texts("input") == ["naïve", "long " * 200, ""][order]
    assert frame.texts("gt_output") == ["14", "14", "2.5"][order]
    for column, rows in (("tok_input", [[1, 300, 70000], list(range(2500)), [7]]), ("array", [[4, 5], [6], []])):
        lengths, tokens = frame.tokens(column)
        assert tokens.dtype == np.int32
        assert [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] == rows[order]
    assert frame.integers("tok_input_length").tolist() == [3, 2500, 1][order]
    assert frame.integers("small").tolist() == [1, 2, 3][order]


def test_the_oldest_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pandas 1.0 to 1.2 give the manager a state. Stand-ins of the same names make such a file."""

    class Base:
        def __setstate__(self, state: Any) -> None: ...

    class DataFrame(Base):
        def __getstate__(self) -> Any:
            axes = [index("Index", {"data": np.array(["n", "t"], object), "name": None}), index("RangeIndex", RANGE)]
            blocks = [
                {"values": np.array([[5, 6]]), "mgr_locs": slice(0, 1, 1)},
                {"values": objects([[7, 8], [9]]), "mgr_locs": np.array([1])},
            ]
            manager = BlockManager()
            manager.state = (axes, [], [], {"0.14.1": {"axes": axes, "blocks": blocks}})
            return {"_data": manager, "_typ": "dataframe"}

    class BlockManager(Base):
        state: Any

        def __getstate__(self) -> Any:
            return self.state

    class Made:
        def __init__(self, args: Any) -> None:
            self.args = args

        def __reduce__(self) -> Any:
            return _new_Index, self.args

    def _new_Index(kind: type, values: dict[str, Any]) -> None: ...

    RANGE = {"name": None, "start": 0, "stop": 2, "step": 1}
    kinds = {name: type(name, (), {}) for name in ("Index", "RangeIndex")}

    def index(name: str, values: dict[str, Any]) -> Made:
        return Made((kinds[name], values))

    def objects(rows: list[list[int]]) -> Any:
        cells = np.empty((1, len(rows)), object)
        for i, row in enumerate(rows):
            cells[0, i] = row
        return cells

    for module, members in {
        "pandas.core.frame": [DataFrame],
        "pandas.core.internals.managers": [BlockManager],
        "pandas.core.indexes.base": [_new_Index, kinds["Index"]],
        "pandas.core.indexes.range": [kinds["RangeIndex"]],
    }.items():
        made = types.ModuleType(module)
        for member in members:
            member.__module__, member.__qualname__ = module, member.__name__
            setattr(made, member.__name__, member)
        for i in range(1, module.count(".") + 1):
            monkeypatch.setitem(sys.modules, module.rsplit(".", i)[0], types.ModuleType(module.rsplit(".", i)[0]))
        monkeypatch.setitem(sys.modules, module, made)
    (tmp_path / "old.pkl").write_bytes(pickle.dumps(DataFrame(), 4))
    frame = read_frame(tmp_path / "old.pkl")
    assert frame.columns == ("n", "t") and frame.integers("n").tolist() == [5, 6]
    assert [part.tolist() for part in frame.tokens("t")] == [[2, 1], [7, 8, 9]]


def written(tmp_path: Path, **columns: Any) -> Path:
    write_frame(tmp_path / "frame.pkl", columns)
    return tmp_path / "frame.pkl"


def test_written_and_read(tmp_path: Path) -> None:
    rows = [[1], [2**31 - 1, 0], list(range(3000))]
    file = written(tmp_path, text=["a", "é" * 300, ""], tokens=rows, n=np.array([1, 2, 3]), same=[[1, 2], [3, 4], [5, 6]])
    packed = tmp_path / "frame.pkl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    for path in (file, packed):
        frame = read_frame(path)
        assert frame.texts("text") == ["a", "é" * 300, ""]
        lengths, tokens = frame.tokens("tokens")
        assert lengths.tolist() == [1, 2, 3000] and tokens.tolist() == [token for row in rows for token in row]
        assert frame.tokens("same")[1].tolist() == [1, 2, 3, 4, 5, 6]
        assert frame.integers("n").tolist() == [1, 2, 3]


def test_a_list_over_frames_of_the_pickle(tmp_path: Path) -> None:
    """Protocol 4 begins a frame every 64 KB, in the middle of a list of integers or not."""
    raw = pickle.dumps(np.random.default_rng(0).integers(300, 128000, 90000).tolist(), 4)
    frames = [at for op, _, at in pickletools.genops(raw) if op.name == "FRAME"]
    assert any(raw[at - 3 : at - 2] == b"M" or raw[at - 5 : at - 4] == b"J" for at in frames[1:])
    file = written(tmp_path, t=[list(range(250, 350)), [1]])
    for end in (b"K\xff", b"M,\x01", b"M]\x01e"):
        file.write_bytes(file.read_bytes().replace(end, b"\x95" + bytes(8) + end, 1))
    lengths, tokens = read_frame(file).tokens("t")
    assert lengths.tolist() == [100, 1] and tokens.tolist() == [*range(250, 350), 1]


class Does:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

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
    "pandas' readers": (b"\x80\x02" + glob("pandas", "read_pickle") + b"X\x01\x00\x00\x00x\x85R.", "pandas.read_pickle"),
    "pandas' eval": (b"\x80\x02" + glob("pandas.core.computation.eval", "eval") + b".", "pandas.core.computation.eval.eval"),
    "numpy's loader": (b"\x80\x02" + glob("numpy", "load") + b".", "numpy.load"),
    "numpy's old door": (b"\x80\x02" + glob("numpy.testing._private.utils", "runstring") + b".", "numpy.testing._private.utils.runstring"),
    "a function of ours": (b"\x80\x02" + glob("mpillm.preprocessed.frames", "read_frame") + b".", "mpillm.preprocessed.frames.read_frame"),
    "a name made by a call": (b"\x80\x04" + glob("builtins", "bytes") + b")R\x8c\x06system\x93.", "something without a plain name"),
    "calling a result": (b"\x80\x03" + glob("numpy", "dtype") + b"X\x02\x00\x00\x00i8\x85R)R.", "calls a dtype"),
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


def test_nothing_that_is_admitted_is_imported(tmp_path: Path) -> None:
    """Names are only names: no module of pandas gets loaded."""
    read_frame(written(tmp_path, t=[[1]])).tokens("t")
    assert "pandas" not in sys.modules


def test_an_attack_in_the_place_of_a_cell(tmp_path: Path) -> None:
    file = tmp_path / "frame.pkl"
    write_frame(file, {"t": [Does(os.system, "true"), [2]]})
    with pytest.raises(ConfigError, match=r"refused: the pickle asks for posix\.system|refused: the pickle asks for nt\.system"):
        read_frame(file)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty"),
        (b"hello world", "not a pickle of protocol 2 to 5"),
        (b"(lp0\n.", "not a pickle of protocol 2 to 5"),
        (pickle.dumps([1, 2], 4), "holds a list, not a pandas data frame"),
        (pickle.dumps(np.arange(3), 4), "holds a _reconstruct, not a pandas data frame"),
        (pickle.dumps({"tok_input": [[1]]}, 4), "holds a dict, not a pandas data frame"),
        (b"\x80\x03" + glob("pandas.core.frame", "DataFrame") + b")\x81}b.", "its data frame has no blocks"),
        (b"\x80\x04h\x07.", "refers to object 7"),
        (b"\x80\x04K\x01a.", "truncated or damaged"),
        (b"\x80\x04N]a.", "damaged: nothing where a list belongs"),
        (b"\x80\x04K\x01K\x02b.", "damaged: int where a call belongs"),
        (b"\x80\x04X\xff\xff\xff\xffabc.", "truncated or damaged"),
        (b"\x80\x04e.", "truncated or damaged"),
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
    """Whatever is cut off or turned over: a frame with these rows, or a ConfigError that names the file, and nothing else."""
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
        (["text", [1]], r"row 0 of column t is no list of tokens: it is text"),
        ([[1], ["a"]], r"row 1 of column t is no list of tokens: it holds text"),
        ([[1], [1.5]], r"row 1 of column t is no list of tokens: it holds float"),
        ([[1], None], r"row 1 of column t is no list of tokens: it is nothing"),
        ([[1], [2**40]], r"row 1 of column t is no list of tokens: an integer of it is no int32"),
        ([[1], np.array([2**31])], r"row 1 of column t is no list of tokens: an integer of it is no int32"),
        ([[1], np.array([1.5])], r"row 1 of column t is no list of tokens: it is an array of float64"),
        ([[1], [[2]]], r"row 1 of column t is no list of tokens: it holds a list"),
        (np.array([1, 2]), r"row 0 of column t is no list of tokens"),
    ],
)
def test_wrong_cells(values: Any, message: str, tmp_path: Path) -> None:
    frame = read_frame(written(tmp_path, t=values))
    with pytest.raises(ConfigError, match=message):
        frame.tokens("t")


def test_wrong_columns(tmp_path: Path) -> None:
    frame = read_frame(written(tmp_path, tok_input=[[1]], text=["a"], ratio=np.array([1.5])))
    for read, message in (
        (lambda: frame.tokens("tok_inputs"), r"no column tok_inputs \(did you mean 'tok_input'\?\); there are: tok_input, text, ratio"),
        (lambda: frame.integers("ratio"), "column ratio is an array of float64"),
        (lambda: frame.integers("text"), "column text is a list, not integers"),
        (lambda: frame.texts("tok_input"), "row 0 of column tok_input is a list, not text"),
    ):
        with pytest.raises(ConfigError, match=message):
            read()
