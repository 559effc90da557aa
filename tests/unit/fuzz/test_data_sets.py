"""Data sets: pickled frames, JSON lists, JSONL, arrays, ShareGPT, and conversions that are kept."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from disagg.errors import ConfigError
from mpillm.data.conversation_dataset import load_conversations
from mpillm.data.data_loader import LLMDataLoader
from mpillm.data.dataset import PromptLimits, load_dataset
from mpillm.data.preprocessed import converted
from mpillm.data.preprocessed.loader import PreprocessedLoader, loader_of
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.submission.references import read_references
from mpillm.triton.client.prompts_file import read_prompts
from mpillm.workloads import WORKLOADS
from mpillm.workloads.workload import Columns
from tests.helpers.fuzzing import NPY_WORDS, changed, damaged, fuzz, json_bytes, npy

FRAMES = [file.read_bytes() for file in sorted(Path("tests/data/frames").glob("*.pkl"))]
NAMES = [
    b"\x8c\x06pandas\x8c\x09DataFrame\x93",
    b"\x8c\x05numpy\x8c\x05dtype\x93",
    b")R",
    b"\x85R",
    b"h\x00",
    b"}",
    b"](",
    b"e",
    b"b",
    b"t",
    b"0",
]
COLUMNS = Columns(tokens="tok_input", lengths="tok_input_length", references=("output",))
LIMITS = PromptLimits(vocab_size=256, max_seq_len=1000, max_output_len=10)
OF_FRAMES = replace(LIMITS, vocab_size=100_000, max_seq_len=4000)


@pytest.mark.long
@fuzz(damaged(FRAMES, NAMES), st.booleans(), refused_by=ConfigError, examples=150)
def test_pickled_frames(folder: Path, data: bytes, packed: bool) -> None:
    file = folder / ("frame.pkl.gz" if packed else "frame.pkl")
    file.write_bytes(gzip.compress(data, 1) if packed else data)
    loader = PreprocessedLoader(file, COLUMNS)
    try:
        loader.references()
    except ConfigError as error:
        assert str(error)
    load_dataset(loader, ByteTokenizer(), OF_FRAMES)


@fuzz(damaged([gzip.compress(FRAMES[0])]), refused_by=ConfigError)
def test_gzip(folder: Path, data: bytes) -> None:
    (file := folder / "frame.pkl.gz").write_bytes(data)
    load_dataset(PreprocessedLoader(file, COLUMNS), ByteTokenizer(), OF_FRAMES)


ROWS = [
    [
        {"tok_input": [1, 2, 3], "tok_input_length": 3, "output": "a"},
        {"tok_input": [4], "tok_input_length": 1, "output": "b"},
    ]
]


@fuzz(changed(ROWS).map(json_bytes) | damaged([json_bytes(ROWS[0])]), refused_by=ConfigError)
def test_frames_in_json(folder: Path, data: bytes) -> None:
    (file := folder / "frame.json").write_bytes(data)
    loader = PreprocessedLoader(file, COLUMNS)
    try:
        loader.references()
    except ConfigError as error:
        assert str(error)
    load_dataset(loader, ByteTokenizer(), LIMITS)


LINES = [
    {"prompt": "hello"},
    {"input_tokens": [1, 2, 3]},
    {"conversations": [{"from": "human", "value": "a"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 3},
    {"custom_id": "a", "body": {"prompt": "a", "max_tokens": 3, "temperature": 0.5}},
    {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]},
    {"conversation_id": "t", "turn": 1, "role": "user", "content": "a"},
]
JSONL = b"\n".join(map(json_bytes, LINES[:2])) + b"\n"
SHARE_GPT = json_bytes(
    [{"id": "a", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}]
)


@pytest.mark.long
@fuzz(
    st.lists(changed(LINES).map(json_bytes), min_size=1, max_size=3).map(b"\n".join)
    | damaged([JSONL, b"\xef\xbb\xbf" + JSONL, SHARE_GPT]),
    refused_by=ConfigError,
    examples=120,
    found=[(json_bytes({"input_tokens": [["A" * 30_000]]}),), (json_bytes({"A" * 30_000: 1}),)],
)
def test_lines(folder: Path, data: bytes) -> None:
    (file := folder / "prompts.jsonl").write_bytes(data)
    load_dataset(file, ByteTokenizer(), LIMITS)


CONVERSATIONS = [
    *LINES,
    {
        "session_id": "r",
        "turns": [
            {
                "messages": [{"role": "user", "content": "a"}],
                "delay": 5,
                "spawns": ["s", {"children": ["t"]}],
            },
            {"messages": [{"role": "user", "content": "b"}], "forks": [{"child": "f", "background": True}]},
        ],
    },
    *({"session_id": name, "turns": [{"messages": [{"role": "user", "content": name}]}]} for name in "stf"),
    {
        "id": "w",
        "requests": [
            {"t": 0, "in": 5, "out": 2, "hash_ids": [1], "api_time": 1},
            {"t": 1, "type": "subagent", "requests": [{"t": 2, "in": 5, "out": 2}]},
            {"t": 3, "in": 6, "out": 2},
        ],
    },
]


@pytest.mark.long
@fuzz(
    st.lists(changed(CONVERSATIONS).map(json_bytes), max_size=3).map(
        lambda rows: b"\n".join([*rows, *map(json_bytes, CONVERSATIONS[-5:])])
    )
    | changed([CONVERSATIONS[-5:]]).map(json_bytes),
    refused_by=ConfigError,
)
def test_conversations(folder: Path, data: bytes) -> None:
    (file := folder / "talks.jsonl").write_bytes(data)
    dataset = load_conversations(file, ByteTokenizer(), LIMITS)
    assert dataset.turns is not None and int(dataset.turns.first[-1]) == len(dataset)


def zipped(data: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", data)
    return made.getvalue()


def without_name(archive: bytes) -> bytes:
    """Return an archive whose directory has a comment of its member where the name was."""
    at = archive.index(b"PK\1\2")
    entry = bytearray(archive)
    entry[at + 28], entry[at + 32] = 0, entry[at + 28]
    return bytes(entry)


TABLE = b'prompt,max_tokens\n"a ""b""",3\nc,4\n'
PACKED = [gzip.compress(JSONL), bz2.compress(JSONL), lzma.compress(JSONL), zipped(JSONL)]


@fuzz(
    damaged([TABLE, *PACKED]),
    st.sampled_from(["csv", "tsv", "txt", "jsonl.gz"]),
    refused_by=ConfigError,
    found=[(without_name(zipped(JSONL)), "csv")],
)
def test_tables_and_packed_files(folder: Path, data: bytes, suffix: str) -> None:
    (file := folder / f"prompts.{suffix}").write_bytes(data)
    load_dataset(file, ByteTokenizer(), LIMITS)


TOKENS, LENGTHS, STOPS = npy([[5, 6, 0], [7, 0, 0]]), npy([2, 1]), npy([[9, 9, 9, 9]] * 2)


@fuzz(
    damaged([TOKENS], NPY_WORDS, most=2),
    damaged([LENGTHS], NPY_WORDS, most=2),
    damaged([STOPS], NPY_WORDS, most=1),
    refused_by=ConfigError,
    found=[(TOKENS, LENGTHS, STOPS.replace(b"{'descr': '<i4',", b"\0"))],
)
def test_arrays(folder: Path, tokens: bytes, lengths: bytes, stops: bytes) -> None:
    for name, data in (("input_ids_padded", tokens), ("input_lens", lengths), ("stop_ids_padded", stops)):
        (folder / f"{name}.npy").write_bytes(data)
    load_dataset(loader_of(folder, None), ByteTokenizer(), replace(LIMITS, stop_words=((9, 9, 9, 9),)))


@fuzz(changed([["lengths", "tokens"]]), damaged([npy([2, 1])], NPY_WORDS), examples=60)
def test_conversions_that_are_kept(folder: Path, names: Any, array: bytes) -> None:
    """What is damaged is made again."""
    (folder / "contents.json").write_bytes(json_bytes(names))
    for name in ("lengths", "tokens"):
        (folder / f"{name}.npy").write_bytes(array)
    converted._read(folder)


@fuzz(
    changed([[{"input": "a", "instruction": "b", "output": "c d"}]]).map(json_bytes), refused_by=ConfigError
)
def test_prompts_for_triton(folder: Path, data: bytes) -> None:
    (file := folder / "prompts.json").write_bytes(data)
    read_prompts(file)


REFERENCE = {"output": "x", "highlights": "y"}


@fuzz(changed([REFERENCE]).map(json_bytes) | damaged([json_bytes(REFERENCE)]), refused_by=ConfigError)
def test_references(folder: Path, line: bytes) -> None:
    (file := folder / "references.jsonl").write_bytes(line)
    read_references(WORKLOADS["llama2-70b"], str(file))


class OwnLoader(LLMDataLoader):
    """A data set of somebody's class, with an array of prompts."""

    def __len__(self) -> int:
        return min(10, len(self.prompts))

    def get_input_tokens(self, sample_indices: Any) -> Any:
        return self.prompts[sample_indices]


@fuzz(damaged([TOKENS], NPY_WORDS, most=2), refused_by=(ConfigError, TypeError, IndexError, ValueError))
def test_arrays_of_a_data_loader(folder: Path, array: bytes) -> None:
    """Its own code may fail on what it has not expected; the file is read, or refused by name."""
    (folder / "prompts.npy").write_bytes(array)
    try:
        loader = OwnLoader(["prompts.npy"], dataset_path=folder)
    except ConfigError:
        return
    except (TypeError, IndexError, ValueError) as error:
        raise AssertionError from error
    loader.load()
