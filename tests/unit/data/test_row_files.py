"""Each file of the page on data sets: read, or refused with a command that converts it."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import shlex
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.data.dataset import Dataset, PromptLimits, load_dataset
from mpillm.data.records import KNOWN, Columns
from mpillm.data.row_files import is_row_file
from mpillm.data.tokenizer import ByteTokenizer

PAGE = Path("docs/reference/data_sets.md")
LIMITS = PromptLimits(max_output_len=100)


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zipped(**files: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(f"{name}.jsonl"), data)  # of no date
    return made.getvalue()


PLAIN = lines({"prompt": "ab"}, {"prompt": "c"})
BOTH = [[97, 98], [99]]
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
BATCH = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": CHAT, "max_tokens": 7, "temperature": 0.5},
}
OWN = {"question": "ab", "budget": 9}
SHARED = {"conversations": [{"from": "human", "value": "ab"}]}
TURNS = [
    {"conversation_id": "t", "turn": 1, "role": "system", "content": "s"},
    {"conversation_id": "t", "turn": 2, "role": "user", "content": "u"},
    {"conversation_id": "t", "turn": 3, "role": "assistant", "content": "a"},
    {"conversation_id": "t", "turn": 4, "role": "user", "content": "v"},
]
GIVEN = Columns("question", "budget")

# The page's row, the file's name and bytes, and what comes of it: prompts, lengths, and text of the note
READ: list[tuple[str, str, bytes, Columns, list[list[int]], list[int] | None, str]] = [
    ("JSONL with `prompt`", "a.jsonl", PLAIN, Columns(), BOTH, None, ""),
    ("JSONL with `prompt`", "a.jsonl", lines({"prompt": [97, 98]}), Columns(), BOTH[:1], None, ""),
    ("JSONL with `input_tokens`", "a.jsonl", lines({"input_tokens": [5]}), Columns(), [[5]], None, ""),
    ("JSONL with `text`", "a.ndjson", lines({"text": "ab"}), Columns(), BOTH[:1], None, ""),
    ("JSONL with `messages`", "a.jsonl", lines({"messages": CHAT}), Columns(), [[*b"s\nu"]], None, ""),
    (
        "OpenAI batch file",
        "a.jsonl",
        lines(BATCH),
        Columns(),
        [[*b"s\nu"]],
        [7],
        "its model, temperature have no effect",
    ),
    (
        "vLLM custom file with `output_tokens`",
        "a.jsonl",
        lines({"prompt": "ab", "output_tokens": 10}, {"prompt": "c", "output_tokens": 500}),
        Columns(),
        BOTH,
        [10, 500],
        "1 of its 2 samples exceed --max_output_len 100 with at most 500 tokens",
    ),
    (
        "GuideLLM file with `output_tokens_count`",
        "a.jsonl",
        lines({"prompt": "ab", "output_tokens_count": 3, "prompt_tokens_count": 9}, {"prompt": "c"}),
        Columns(),
        BOTH,
        [3, 1 << 40],
        "",
    ),
    ("JSONL with other fields", "a.jsonl", lines(OWN), GIVEN, BOTH[:1], [9], ""),
    ("CSV or TSV with a header", "a.csv", b'prompt,max_tokens\n"ab",3\nc,4\n', Columns(), BOTH, [3, 4], ""),
    ("CSV or TSV with a header", "a.tsv", b"question\tbudget\nab\t9\n", GIVEN, BOTH[:1], [9], ""),
    ("plain text, `.txt`", "a.txt", b"ab\n\nc", Columns(), BOTH, None, ""),
    ("gzip, bzip2 or xz of these", "a.jsonl.gz", gzip.compress(PLAIN, mtime=0), Columns(), BOTH, None, ""),
    ("gzip, bzip2 or xz of these", "a.csv.bz2", bz2.compress(b"prompt\nab\nc\n"), Columns(), BOTH, None, ""),
    ("gzip, bzip2 or xz of these", "a.txt.xz", lzma.compress(b"ab\nc\n"), Columns(), BOTH, None, ""),
    ("gzip, bzip2 or xz of these", "download", gzip.compress(PLAIN, mtime=0), Columns(), BOTH, None, ""),
    ("zip archive with one file", "a.zip", zipped(a=PLAIN), Columns(), BOTH, None, ""),
]
REFUSED: list[tuple[str, str, bytes, str]] = [
    (
        "JSONL with other fields",
        "a.jsonl",
        lines(OWN),
        'a.jsonl:1: neither "prompt" nor "input_tokens", but question, budget; name .* --prompt_column',
    ),
    (
        "zip archive with several files",
        "a.zip",
        zipped(a=PLAIN, b=PLAIN),
        "a zip archive of a.jsonl, b.jsonl; make JSONL of it by\n  unzip -p .*a.zip MEMBER > prompts.jsonl",
    ),
    ("Zstandard file", "a.jsonl.zst", b"\x28\xb5\x2f\xfd1234", "zstd -dc .* > prompts.jsonl"),
    ("text in UTF-16", "a.csv", "prompt\nab".encode("utf-16"), "iconv -f UTF-16 -t UTF-8 .* > prompts.jsonl"),
    ("SQLite database", "a.db", b"SQLite format 3\x00", "sqlite3 -csv -header"),
    ("JSON array", "a.jsonl", b'[{"prompt": "ab"}]', "is a JSON array.*\n  python3 -c"),
    ("ShareGPT file, as an array or JSONL", "a.jsonl", json.dumps([SHARED]).encode(), "is a ShareGPT file"),
    (
        "ShareGPT file, as an array or JSONL",
        "a.jsonl",
        lines(SHARED),
        "a ShareGPT .*; use `run --harness conv",
    ),
    (
        "MLCommons' turns of agents",
        "a.jsonl",
        lines(*TURNS),
        "jsonl:1: a turn of .*; use `run --harness conv",
    ),
    (
        "conversations of AIPerf and GuideLLM",
        "a.jsonl",
        lines({"turns": []}),
        "jsonl:1: a conversation, not .* --harness",
    ),
    (
        "conversations of AIPerf and GuideLLM",
        "a.jsonl",
        lines({"prompt_0": "a"}),
        "a conversation, not .* --harness",
    ),
    *(
        ("Parquet or Arrow, without pyarrow", name, data, f"is {what}, which needs pyarrow: .*\n  python3 -c")
        for name, data, what in (
            ("a.parquet", b"PAR1....PAR1", "a Parquet file"),
            ("a.arrow", b"ARROW1..", "an Arrow file"),
            ("a.arrow", b"\xff\xff\xff\xff....", "an Arrow stream"),
            ("a.feather", b"FEA1....", "a Feather file"),
        )
    ),
]


def load(folder: Path, name: str, data: bytes, columns: Columns = KNOWN) -> Dataset:
    (folder / name).write_bytes(data)
    return load_dataset(folder / name, ByteTokenizer(), LIMITS, columns)


def prompts_of(dataset: Dataset) -> list[list[int]]:
    return [dataset.sample(i).tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("case", READ, ids=[f"{row}-{name}" for row, name, *_ in READ])
def test_read(tmp_path: Path, case: tuple[Any, ...]) -> None:
    _, name, data, columns, prompts, lengths, note = case
    dataset = load(tmp_path, name, data, columns)
    assert prompts_of(dataset) == prompts
    assert (None if dataset.output_lengths is None else dataset.output_lengths.tolist()) == lengths
    assert note in dataset.note and bool(note) == bool(dataset.note)


@pytest.mark.parametrize("case", REFUSED, ids=[f"{row}-{name}" for row, name, *_ in REFUSED])
def test_refused_with_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, bytes, str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    _, name, data, message = case
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, name, data)
    assert str(tmp_path) in str(caught.value)


def test_every_row_of_the_page_is_typed() -> None:
    rows = [
        line.split("|")[1].strip()
        for line in PAGE.read_text().split("\n## ")[0].splitlines()
        if line.startswith("|")
    ][2:]
    elsewhere = {"Mooncake trace", "Parquet or Arrow, with pyarrow", "MLPerf's preprocessed data"}
    assert set(rows) == {row for row, *_ in READ} | {row for row, *_ in REFUSED} | elsewhere


@pytest.mark.parametrize(
    ("data", "prompts"), [(lines(SHARED), BOTH[:1]), (lines(*TURNS), [[*b"s\nu"], [*b"s\nu\na\nv"]])]
)
def test_the_command_of_a_refusal_works(tmp_path: Path, data: bytes, prompts: list[list[int]]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "it's a.jsonl", data)
    command = str(caught.value).splitlines()[-1].replace("python3", shlex.quote(sys.executable), 1)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=300)
    assert prompts_of(load_dataset(tmp_path / "prompts.jsonl", ByteTokenizer())) == prompts


def test_a_trace(tmp_path: Path) -> None:
    """Prompts have the lengths in it, and the same tokens where the hash ids are the same."""
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 50, "hash_ids": [0, 1]},
        {"timestamp": 3, "input_length": 1024, "output_length": 60, "hash_ids": [0, 2]},
        {"timestamp": 3, "input_length": 600, "output_length": 1, "hash_ids": []},
        {"timestamp": 4, "input_length": 600, "output_length": 1},
    ]
    dataset = load(tmp_path, "trace.jsonl", lines(*rows))
    assert dataset.n_tokens.tolist() == [700, 1024, 600, 600]
    assert dataset.output_lengths is not None and dataset.output_lengths.tolist() == [50, 60, 1, 1]
    first, second, third, fourth = prompts_of(dataset)
    assert first[:512] == second[:512] != third[:512] != fourth[:512]
    assert first[512:] != second[512:700]
    assert "its timestamp has no effect; its prompts are random tokens, with the trace's lengths" in (
        dataset.note
    )
    for length, message in ((10**10, "its prompts have 10000000000 tokens"), (0, "input_length is 0")):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, "trace.jsonl", lines({"input_length": length, "output_length": 1}))
    with pytest.raises(
        ConfigError, match=r"a\.jsonl:2: the prompt has 1024 tokens and does not fit max_seq_len 650"
    ):
        load_dataset(
            _written(tmp_path, lines(*rows)), ByteTokenizer(), PromptLimits(max_seq_len=650, max_output_len=1)
        )


def _written(folder: Path, data: bytes) -> Path:
    (folder / "a.jsonl").write_bytes(data)
    return folder / "a.jsonl"


def test_parquet_with_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a small stand-in where pyarrow is not installed: batches of rows."""

    class Batch:
        def to_pylist(self) -> list[dict[str, Any]]:
            return [{"prompt": "ab"}, {"prompt": "c"}]

    fake, parquet, ipc = (types.ModuleType(name) for name in ("pyarrow", "pyarrow.parquet", "pyarrow.ipc"))
    fake.ArrowException = ArithmeticError  # type: ignore[attr-defined]
    fake.parquet, fake.ipc = parquet, ipc  # type: ignore[attr-defined]
    parquet.ParquetFile = lambda stream: types.SimpleNamespace(  # type: ignore[attr-defined]
        iter_batches=lambda n: [Batch()]
    )
    ipc.open_stream = lambda stream: [Batch()]  # type: ignore[attr-defined]
    ipc.open_file = lambda stream: types.SimpleNamespace(  # type: ignore[attr-defined]
        num_record_batches=1, get_batch=lambda i: Batch()
    )
    for module in (fake, parquet, ipc):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, data in (("a.parquet", b"PAR1"), ("a.arrow", b"ARROW1"), ("a.arrows", b"\xff\xff\xff\xff")):
        assert prompts_of(load(tmp_path, name, data)) == BOTH


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl.gz", gzip.compress(PLAIN, mtime=0)[:-9], "truncated or damaged"),
        ("a.gz.gz", gzip.compress(gzip.compress(PLAIN, mtime=0), mtime=0), "gzip in a packed file"),
        ("a.zip", zipped(a=b"x\n"), r"^(?!.*not a zip).*a\.zip:1: not valid JSON"),
        ("a.zip", b"PK\x03\x04 nothing", "not a zip archive that can be read"),
        ("a.csv", b'prompt,n\n"ab', "a.csv:1: not CSV in UTF-8"),
        ("a.csv", b"prompt,n\nab\n", "a.csv:2: its number of fields differs from the header's, 2"),
        ("a.csv", b"prompt\n\xff\n", "not CSV in UTF-8"),
        ("a.txt", b"ok\n\xff\n", "a.txt:2: byte 1 is not UTF-8"),
        ("a.jsonl", lines({"messages": []}), "messages is .*; must be an array of messages"),
        ("a.jsonl", lines({"messages": [{"content": "x"}]}), "must be objects with role and content"),
        (
            "a.jsonl",
            lines({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "only parts of text can be read",
        ),
        ("a.jsonl", lines({"prompt": "a", "output_tokens": -1}), "output_tokens is -1; must be a number"),
        ("a.jsonl", lines({"prompt": "a", "output_tokens": [1]}), "output_tokens is .* must be a number"),
        (
            "a.jsonl",
            lines({"prompt": "a", "output_tokens": 3, "max_tokens": 4}),
            "output_tokens 3 and max_tokens 4 differ; name one by --output_len_column",
        ),
    ],
)
def test_wrong(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, name, data)


def test_wrong_columns(tmp_path: Path) -> None:
    for columns, message in (
        (Columns("questio"), r"no column questio \(--prompt_column\) \(did you mean 'question'\?\)"),
        (Columns("question", "x"), r"no column x \(--output_len_column\).*; there are question, budget"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, "a.jsonl", lines(OWN), columns)
    with pytest.raises(ConfigError, match="a line of text has no columns"):
        load(tmp_path, "a.txt", b"x\n", Columns("question"))


def test_a_packed_file_that_fills_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "bomb.jsonl.gz"
    with gzip.open(file, "wb", 9) as stream:
        for _ in range(100):
            stream.write(bytes(1 << 20))
    with pytest.raises(ConfigError, match="expands to more than"):
        load_dataset(file, ByteTokenizer())


def test_names_of_row_files() -> None:
    for name in ("a.jsonl", "a.csv.gz", "b.parquet", "c.txt.zip"):
        assert is_row_file(Path(name))
    for name in ("a.pkl", "a.pkl.gz", "folder", "a.npy", "a.json"):
        assert not is_row_file(Path(name))
