"""Errors about text from outside, which may have any length."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest

import disagg
from disagg.errors import ConfigError
from mpillm.doctor.gpus import parse_devices
from mpillm.engine.shape.weight_files import INDEX, weight_files

_LONG = 200_000


def test_a_long_message_keeps_its_begin_and_its_end() -> None:
    error = ConfigError(f"d.yaml: unknown key '{'A' * _LONG}'; remove it", about=["disagg_config"])
    text = str(error)
    assert text.startswith("d.yaml: unknown key 'AAA") and text.endswith("AAA'; remove it")
    assert len(text) < 3100 and "characters left out" in text and error.about == ("disagg_config",)
    path = f"/{'d' * 2900}: no such folder"
    assert str(ConfigError(path)) == path


def test_a_long_key_of_a_yaml_is_not_quoted_whole(tmp_path: Path) -> None:
    (file := tmp_path / "d.yaml").write_text(f"? {'A' * _LONG}\n: .nan\nexecutors: {{num_instances: 1}}\n")
    with pytest.raises(ConfigError, match=r"d\.yaml: AAA.*a finite number") as caught:
        disagg.load(str(file))
    assert len(str(caught.value)) < 3100


def test_a_deeply_nested_yaml_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "d.yaml").write_text(f"a: {'[' * 2000}")
    with pytest.raises(ConfigError, match=r"d\.yaml: nested too deeply"):
        disagg.load(str(file))


def test_a_long_field_of_nvidia_smi_is_an_unexpected_line(request: pytest.FixtureRequest) -> None:
    """The csv module has an error of its own, and a limit for a field, which data sets raise."""
    request.addfinalizer(partial(csv.field_size_limit, csv.field_size_limit(_LONG // 2)))
    with pytest.raises(ValueError, match="unexpected line: field larger"):
        parse_devices(f"0, {'A' * _LONG}, 1, 2, 3, 4, 5")


@pytest.mark.parametrize("name", ["A" * 300, "é" * 200, f"a/{'b' * 256}/c"])
def test_a_long_name_in_an_index_of_weights_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{"w": "{name}"}}}}', encoding="utf-8")
    with pytest.raises(ConfigError, match="which is not a file name"):
        weight_files(tmp_path)
