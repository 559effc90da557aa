"""Help lists every option, with examples that work; a misspelt command or option names the nearest."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpillm.options.fields import FIELDS
from mpillm.options.options import parse_run
from tests.helpers.lone_mpi import leaving_nothing

ROOT = Path(__file__).parents[3]


def mpillm(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    with leaving_nothing() as variables:
        return subprocess.run(
            [sys.executable, "-m", "mpillm", *words],
            env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            cwd=cwd,
        )


def test_help_lists_every_option() -> None:
    completed = mpillm("run", "--help", "all")
    assert completed.returncode == 0
    elsewhere = {"plan", "stages", "server", "serve", "checkpoint", "submission"}
    there = [f for f in FIELDS if f"--{f.name} " in completed.stdout or f"--{f.name}, " in completed.stdout]
    assert [f.name for f in FIELDS if (f in there) == (f.group in elsewhere)] == [
        "force",
        "server_port",
        "worker_start_port",
        "tritonserver",
    ]
    assert mpillm("--help").returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "plan", "generate-disagg-config"])
def test_examples_of_help_are_right(command: str, tmp_path: Path) -> None:
    """Every option in an example of --help exists, and its value is valid."""
    help_text = mpillm(command, "--help").stdout
    text = help_text.partition("example")[2].replace("\\\n", "")
    examples = re.findall(rf"python -m mpillm {command} (.*)", text)
    assert examples
    for example in examples:
        words = [word.replace("DIR", "tiny-llama") for word in shlex.split(example)]
        if command == "run":
            assert parse_run(words)
        else:
            (tmp_path / "disagg.yaml").write_text(
                "context_servers: {num_instances: 3}\ngeneration_servers: {num_instances: 4}\n"
            )
            ended = mpillm(command, *words, cwd=tmp_path)
            assert ended.returncode == 0, ended.stderr


def test_help_without_a_topic_is_short_and_names_the_topics() -> None:
    """It fits 80 columns where no terminal is known; a topic shows its options alone."""
    short, whole = mpillm("run", "--help").stdout, mpillm("run", "--help", "all").stdout
    assert len(short.splitlines()) < len(whole.splitlines()) / 2
    assert "--model_path" in short and "--stall_timeout" not in short and "--stall_timeout" in whole
    lines = [*whole.partition("examples:")[0].splitlines(), *mpillm("--help").stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    topics = " ".join(short.split()).partition("Topics: ")[2].partition(".")[0].split(", ")
    assert "deadlines" in topics and "model" in topics
    found = mpillm("run", "--help", "deadlines").stdout.partition("examples:")[0]
    assert "--stall_timeout" in found and "--model_path" not in found
    wrong = mpillm("run", "--help", "deadline")
    assert wrong.returncode == 2 and "did you mean 'deadlines'?" in wrong.stderr


def test_help_has_units_and_defaults() -> None:
    help_text = " ".join(mpillm("run", "--help", "all").stdout.split())
    assert "phase load, seconds [default: 1800.0]" in help_text
    assert (
        "LoadGen's scenario: Offline, Server, SingleStream; Interactive is Server with a workload's"
        " interactive form [default: Offline]" in help_text
    )
    assert "--save_outputs [OUTPUTS] write every answer to outputs.jsonl [default: false]" in help_text


def test_commands() -> None:
    wrong = mpillm("plam")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("mpillm: no command 'plam' (did you mean 'plan'?)")
    assert mpillm().returncode == 2


def test_bad_options_of_other_commands() -> None:
    wrong = mpillm("plan", "--world_sise", "4")
    assert wrong.returncode == 2
    assert "did you mean '--world_size'?" in wrong.stderr
    assert wrong.stdout == ""
