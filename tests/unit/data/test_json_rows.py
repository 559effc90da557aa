"""A data set as JSON: read piece by piece, and what can be wrong with the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm import workloads
from mpillm.data.preprocessed.frames import json_rows
from mpillm.data.preprocessed.loader import loader_of
from mpillm.submission.references import read_references

ROWS: list[dict[str, Any]] = [
    {
        "instruction": {"llama": "Summarize: {input}"},
        "input": f"Caf\u00e9 \u201cnews\u201d ], }} [{{ \\ {i}",
        "tok_input": list(range(128000, 128000 + 40 * (i + 1))),
        "output": f"summary {i}",
    }
    for i in range(9)
]


def write(folder: Path, text: str, name: str = "cnn_eval.json") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 4])
def test_rows(chunk: int, indent: int | None, tmp_path: Path) -> None:
    """Wherever the file is cut for reading, its rows are the same."""
    rows = ROWS[:2] if chunk == 1 else ROWS
    found = list(json_rows(write(tmp_path, json.dumps(rows, indent=indent, ensure_ascii=False)), chunk))
    assert [row["tok_input"].tolist() for row in found] == [row["tok_input"] for row in rows]
    assert all(row["tok_input"].dtype == np.int32 for row in found)
    rest = [{name: value for name, value in row.items() if name != "tok_input"} for row in found]
    assert rest == [{name: value for name, value in row.items() if name != "tok_input"} for row in rows]


def test_the_published_format(tmp_path: Path) -> None:
    """llama3.1-8b's file, by its folder or its own path: prompts and reference answers."""
    workload = workloads.get("llama3.1-8b")
    file = write(tmp_path, json.dumps(ROWS, indent=4, ensure_ascii=False))
    for path in (tmp_path, file):
        samples = loader_of(path, workload).load()
        assert samples.lengths.tolist() == [len(row["tok_input"]) for row in ROWS]
        assert samples.tokens.tolist() == [token for row in ROWS for token in row["tok_input"]]
    assert read_references(workload, str(file)) == [{"output": row["output"]} for row in ROWS]


WHOLE = json.dumps(ROWS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WHOLE[:-40], "truncated, or not JSON"),
        ('{"tok_input": [1]}', "not a JSON list of objects"),
        ("[1, 2]", "not a JSON list of objects"),
        ("", "not a JSON list of objects"),
        ('[{"tok_input": [1], "output": "a"}, {"tok_input": [1]}]', "row 1 has the fields tok_input; row 0"),
        ('[{"ids": [1], "output": "a"}]', "no column tok_input"),
        ('[{"tok_input": [1.5], "output": "a"}]', "row 0 of column tok_input is not a list of tokens"),
        ('[{"tok_input": [2147483648], "output": "a"}]', "an integer does not fit int32"),
        ("[]", "no column tok_input"),
        ('[{"tok_input": 9223372036854775808, "output": "a"}]', "row 0 of column tok_input is not a list"),
        ('[{"tok_input": ' + "[" * 100_000, "nested too deep"),
    ],
)
def test_a_wrong_file(text: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as error:
        loader_of(file, workloads.get("llama3.1-8b")).load()
    assert str(file) in str(error.value)


def test_a_long_row_is_not_read_again_for_each_piece_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    decode = json.JSONDecoder.raw_decode

    def counting(self: json.JSONDecoder, text: str, place: int = 0) -> Any:
        tried.append(len(text) - place)
        return decode(self, text, place)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counting)
    text = json.dumps([{"text": "a" * 100_000}])
    assert len(list(json_rows(write(tmp_path, text), 16))) == 1
    assert sum(tried) < 4 * len(text)


def test_references_nested_too_deep(tmp_path: Path) -> None:
    text = '{"output": ' + "[" * 100_000
    with pytest.raises(ConfigError, match=r"references\.jsonl:1: not valid JSON"):
        read_references(workloads.get("llama3.1-8b"), str(write(tmp_path, text, "references.jsonl")))


def test_references_have_the_lines_of_the_data_set(tmp_path: Path) -> None:
    """JSON may contain other line separators than \\n. Blank lines are no rows."""
    rows = [{"output": "a\u2028b\x85c"}, {"output": "d"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file = write(tmp_path, text + "\n", "references.jsonl")
    assert read_references(workloads.get("llama3.1-8b"), str(file)) == rows
