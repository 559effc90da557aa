"""What docs/reference/configuration.md shows works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpillm.nvidia import tree_files
from mpillm.nvidia.unsupported_fields import UNSUPPORTED_FIELDS
from mpillm.options.command_line import Parser
from mpillm.options.fields import FIELDS
from mpillm.options.options import parse

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "configuration.md").read_text()


def block(language: str, word: str) -> str:
    (found,) = [
        text
        for kind, text in re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
        if kind == language and word in text
    ]
    return str(found)


def test_the_python_file(tmp_path: Path) -> None:
    path = tmp_path / "my.py"
    path.write_text(block("python", "ConfigRegistry"))
    config = parse(["--config_file", str(path)], Parser(prog="mpillm x"), FIELDS)
    assert (config.benchmark, config.pipeline_parallelism, config.max_batch_size) == ("llama2-70b", 2, 2048)


def test_the_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(block("yaml", "name: offline"))
    for scenario, qps in (("Offline", None), ("Server", 12.5)):
        config = parse(["--config_file", str(path), "--scenarios", scenario], Parser(prog="mpillm x"), FIELDS)
        assert (config.scenario, config.is_user_set("server_target_qps") and config.server_target_qps) == (
            scenario,
            qps or False,
        )


def row(value: str) -> list[str]:
    """Return the names in a row of the table of NVIDIA's fields."""
    (names,) = re.findall(rf"^\| (.*) \| {value}", PAGE, re.MULTILINE)
    return re.findall(r"`(\w+)`", names)


def test_fields_without_effect() -> None:
    assert row("no effect: ") == [*UNSUPPORTED_FIELDS]


def test_durations() -> None:
    assert row("milliseconds, as ") == [*tree_files._DURATIONS]
    (sentence,) = re.findall(r"Only (.*) have different units", PAGE)
    assert re.findall(r"`(\w+)`", sentence) == [*tree_files._DURATIONS]


def test_the_class(capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("python", "class LLMThing"), {})
    assert capsys.readouterr().out == "{'n_tokens': 42}\n{'foo': 'bar'}\n"


def test_the_new_option() -> None:
    names: dict[str, object] = {}
    exec(
        "from mpillm.configurator import Field\nfrom mpillm.fields import positive\n"
        + block("python", "max_queue_size"),
        names,
    )
    assert names["max_queue_size"].default_text == "1000"  # type: ignore[attr-defined]
