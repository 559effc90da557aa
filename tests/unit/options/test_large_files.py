"""Configurations that take no time and no memory, whatever somebody has put into them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from disagg import config as disagg_config
from disagg.errors import ConfigError
from mpillm.experiments.option_grid import grid_of_yaml
from mpillm.files import read_json
from mpillm.loadgen.settings import _user_lines
from mpillm.options.options import parse_run
from mpillm.submission.endpoint_points import read_yaml

PATIENCE_S = 60.0  # for what takes hours, or does not end
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a disaggregation YAML": ("a.yaml", lambda path: disagg_config.load(str(path))),
    "--config_file YAML": ("a.yaml", lambda path: parse_run(["--config_file", str(path)])),
    "--config_file .py": ("a.py", lambda path: parse_run(["--config_file", str(path)])),
    "--grid": ("a.yaml", grid_of_yaml),
    "a point of endpoints-submission": ("a.yaml", read_yaml),
    "--user_conf": ("user.conf", _user_lines),
}
MERGES = "a: &a {top_k: 1}\n" + "".join(
    f"{a}{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}\n" for a, b in pairwise("abcdefghijklmnop")
)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("large", ["a file of 20 MB", "a file without end"])
def test_a_configuration_has_a_limit(reader: str, large: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    path = tmp_path / name
    if large == "a file without end":
        path.symlink_to("/dev/zero")
        wrong = "neither a file nor a folder"
    else:
        path.write_text(f"executors: {'x' * 20_000_000}\n")
        wrong = "more than 1048576 bytes"
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"{name}: {wrong}"):
        read(path)
    assert time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize("reader", [name for name in READERS if "YAML" in name or name == "--grid"])
@pytest.mark.parametrize(
    "text",
    [
        "top_k: !!" + "x" * 500_000 + " 1",
        "top_k: &" + "x" * 500_000 + " [*" + "y" * 500_000 + "]",
        "'" + "x" * 250_000 + "': 1\n'" + "x" * 250_000 + "': 1",
        "top_k: " + "9" * 500_000,
        "top_k: " + "1_" * 100_000 + "x: y",
        MERGES + "top_k: [",
        MERGES + "p: {",
        "[" * 100_000,
        "- " * 100_000,
        "? " * 100_000,
        "{" * 100_000,
    ],
    ids=["a tag", "an alias", "a key twice", "a number", "no number", "merges", "merges 2", *"[-?{"],
)
@pytest.mark.long
def test_an_error_comes_quickly_and_is_short(reader: str, text: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    path = tmp_path / name
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        read(path)
    assert time.monotonic() - began < PATIENCE_S
    assert len(str(error.value)) < 1500, len(str(error.value))


def test_merges_of_merges_end(tmp_path: Path) -> None:
    """Ten aliases of ten aliases of …: also where each key's line is looked for."""
    path = tmp_path / "a.yaml"
    maps = ["&a {top_k: 7}"]
    maps += [f"&{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}" for a, b in pairwise("abcdefghijklmnop")]
    path.write_text(f"<<: [{', '.join(maps)}]\n")
    began = time.monotonic()
    assert parse_run(["--config_file", str(path)]).top_k == 7
    assert time.monotonic() - began < PATIENCE_S


def test_json_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'"{"x" * 998}"')
    assert read_json(path, max_bytes=1000) == "x" * 998
    path.write_text(f'"{"x" * 999}"')
    with pytest.raises(ConfigError, match=r"a\.json: more than 1000 bytes of JSON"):
        read_json(path, max_bytes=1000)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"a\.json: neither a file nor a folder"):
        read_json(path)
