"""fill-template: the words and the results of TensorRT-LLM's fill_template.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpillm.cli import main
from mpillm.triton.commands.fill_template import fill, placeholders, split, substitutions

TEMPLATE = """max_batch_size: ${triton_max_batch_size}
model_transaction_policy { decoupled: ${decoupled_mode} }
parameters { key: "engine_dir" value { string_value: "$engine_dir" } }
dynamic_batching { default_queue_policy { max_queue_size: ${max_queue_size} } } # costs $$5
"""
FILLED = """max_batch_size: 4
model_transaction_policy { decoupled: true }
parameters { key: "engine_dir" value { string_value: "/a:b,c" } }
dynamic_batching { default_queue_policy { max_queue_size: 0 } } # costs $5
"""
WORDS = r"triton_max_batch_size:4,decoupled_mode:true,engine_dir:/a\\\:b\\\,c"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.pbtxt"
    path.write_text(TEMPLATE)
    return path


def test_split() -> None:
    assert split("a,b", ",") == ["a", "b"] and split("", ",") == [""]
    assert split(r"a\,b,c\\d", ",") == ["a,b", "c\\d"]
    assert substitutions(r"a:b,c:d\\\:e") == {"a": "b", "c": "d:e"}


def test_placeholders_and_values() -> None:
    assert placeholders(TEMPLATE) == [
        "triton_max_batch_size",
        "decoupled_mode",
        "engine_dir",
        "max_queue_size",
    ]
    assert fill("${a} ${b} ${max_queue_size} ${max_queue_delay_microseconds}", {"a": "$b"}) == "$b ${b} 0 0"


@pytest.mark.parametrize("name", ["fill-template", "fill_template.py"])
def test_printed(name: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, str(file), WORDS]) == 0
    assert capsys.readouterr().out == FILLED + "\n"
    assert file.read_text() == TEMPLATE


@pytest.mark.parametrize("words", [("-i", "FILE", WORDS), ("FILE", WORDS, "--in_place")])
def test_in_place(words: tuple[str, ...], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fill-template", *(str(file) if word == "FILE" else word for word in words)]) == 0
    assert file.read_text() == FILLED and capsys.readouterr().out == ""
    assert [path.name for path in file.parent.iterdir()] == ["config.pbtxt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "decoupled_mod3:true",
            "has no placeholder 'decoupled_mod3' (did you mean 'decoupled_mode'?);"
            " it has: triton_max_batch_size, decoupled_mode, engine_dir, max_queue_size",
        ),
        ("decoupled_mode", "'decoupled_mode' is not a substitution; expected name:value"),
        ("engine_dir:C:/x", "'engine_dir:C:/x' is not a substitution; expected name:value"),
    ],
)
def test_a_wrong_substitution_is_named(
    words: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fill-template", "-i", str(file), words]) == 2
    assert message in capsys.readouterr().err
    assert file.read_text() == TEMPLATE


def test_a_word_of_the_file_that_is_no_placeholder(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script takes it, for example where the file is filled already."""
    assert main(["fill-template", "-i", str(file), "max_batch_size:4"]) == 0
    assert capsys.readouterr().err == f"fill-template: {file}: 'max_batch_size' is not a placeholder in it\n"
    assert file.read_text() == TEMPLATE.replace("$$", "$").replace("${max_queue_size}", "0")


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fill-template", str(tmp_path / "none"), "a:b"]) == 2
    assert f"mpillm: {tmp_path / 'none'}: cannot be read: No such file" in capsys.readouterr().err
