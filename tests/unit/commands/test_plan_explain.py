"""``plan --explain OPTION``: the way of a value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpillm.cli import main


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "--format", "json", "--explain", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_rule_that_sets_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--explain", "--max-batch-size", "--gpu_batch_size", "8"]) == 2  # two options
    capsys.readouterr()
    words = ("--explain", "max_batch_size", "--benchmarks", "llama2-70b", "--gpu_batch_size", "llama2-70b:8")
    assert main(["plan", *words]) == 0
    output = capsys.readouterr().out
    assert output.startswith("max_batch_size is 8, from command line: gpu_batch_size\n")
    assert "rules that changed it\n  gpu_batch_size sets max_batch_size" in output
    assert "options that may set it: gpu_batch_size, trtllm_runtime_flags" in output


def test_the_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that say something, the highest first; the one in force is the first."""
    file = tmp_path / "mine.yaml"
    file.write_text("max_output_len: 7\n")
    words = ("max_output_len", "--benchmarks", "llama2-70b", f"--config_file={file}")
    way = explained(capsys, *words, "--max_output_len", "5")
    assert [one["value"] for one in way["stated"]] == [5, 7, 1024, way["stated"][-1]["value"]]
    assert [one["from"].partition(":")[0] for one in way["stated"]] == [
        "command line",
        str(file),
        "workload llama2-70b",
        "default",
    ]
    assert way["value"] == 5 and way["rules"] == []
    assert explained(capsys, *words)["value"] == 7


def test_a_yaml_and_its_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "disagg.yaml"
    section = "{num_instances: 1, tensor_parallel_size: 1, max_batch_size: %d, urls: ['localhost:%d']}"
    file.write_text(f"context_servers: {section % (3, 8001)}\ngeneration_servers: {section % (9, 8002)}\n")
    way = explained(capsys, "max_batch_size", "--core_type", "dummy", "--disagg_config", str(file))
    values = {section: one["value"] for section, one in way["sections"].items()}
    assert values == {"context_servers": 3, "generation_servers": 9}
    assert all(str(file) in one["from"] for one in way["sections"].values())


def test_a_name_that_states_a_form(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--benchmarks", "llama2-70b", "--scenarios", "Interactive")
    way = explained(capsys, "scenarios", *words)
    assert way["value"] == ["Server"] and way["stated"][0]["value"] == ["Interactive"]
    assert way["rules"][0]["from"] == "command line: scenarios Interactive"
    way = explained(capsys, "scenarios", "--benchmarks", "llama2-70b-interactive")
    assert way["value"] == ["Server"] and way["stated"][0]["from"].startswith("workload")


def test_a_secret_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--explain", "api_key", "--api_key", "hunter2"]) == 0
    assert "hunter2" not in capsys.readouterr().out


def test_no_such_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--explain", "max_batch_sise"]) == 2
    assert "did you mean 'max_batch_size'" in capsys.readouterr().err
