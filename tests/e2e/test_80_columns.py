"""What commands print fits 80 columns, on a terminal and in a pipe."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.screen import screen
from tests.helpers.support import Command, Ended, Starter, wait_until

DUMMY = ("-n", 3, "--core_type", "dummy", "--max_output_len", 2)
SHORT = ("--min_duration", 2, "--server_target_qps", 200, "--goodput", "ttft:500", "tpot:50")


def fits(ended: Ended, code: int = 0, prose: bool = True) -> list[str]:
    """Return the lines shown; one of more than 80 columns fails, but for a path, which nothing breaks.

    `prose`: also lines without columns.
    """
    lines = screen(ended.must(code).out, 400)  # a line that a narrow terminal would continue is whole here
    assert lines
    for line in lines:
        if not prose and not re.search(r"\S  +\S", line):
            continue
        assert len(line) <= 80 or len(max(line.split(), key=len)) > 40, f"{len(line)} columns: {line}"
    return lines


def typed(one: Starter, *words: object, pipe: bool = False) -> Command:
    """Start ``python -m mpillm WORDS`` in front of a terminal, or with stdout in a pipe."""
    return one.command([one.python, "-m", "mpillm", *words], terminal=not pipe, one_terminal=not pipe)


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--world_size", 40, "--mode", "disaggregated"),
        ("plan", "--world_size", 300, "--nodes", ",".join(f"gpu-node-{i:04}:10" for i in range(30))),
        ("plan", "--world_size", 3, "--server", "vllm", "--model_path", "/models/one-of-a-usual-length"),
        ("bench",),
        ("doctor",),
        ("mpirun", "-n", 3, "doctor"),
    ],
    ids=lambda words: " ".join(map(str, words[:3])),
)
@pytest.mark.parametrize("pipe", [False, True])
def test_commands_without_a_run(one: Starter, words: Sequence[object], pipe: bool) -> None:
    fits(typed(one, *words, pipe=pipe).end(120), prose=not pipe)


@pytest.mark.parametrize("pipe", [False, True])
def test_a_run_and_what_reads_it(one: Starter, pipe: bool) -> None:
    """The mpirun line as well, which stderr has in a pipe."""
    run = ("--core_type", "dummy", "--scenarios", "Server", *SHORT, "--mode", "disaggregated")
    ended = typed(one, "mpirun", "-n", 4, "run", *run, "--log_dir", "a", pipe=pipe).end(120)
    lines = fits(ended, prose=not pipe)
    assert any(line.startswith("  time to first token") for line in lines)
    command = ended.err if pipe else "\n".join(lines)
    assert "/mpirun -n 4" in command and "\\\n    " in command
    path = one.folder / "a" / "result.json"
    result = json.loads(path.read_text())
    result["doubts"] = ["the system did not keep up: " + "words " * 30]
    path.write_text(json.dumps(result))
    for words in (("runs", "."), ("compare", "a", "a", "a", "--log_dir", "c"), ("rerun", "a", "--dry_run")):
        fits(typed(one, *words, pipe=pipe).end(120), prose=not pipe)


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--min_duration="),
        ("run", "--benchmarks", "llama2-70b", "--scenarios", "Fast"),
        ("serve", "--help", "nothing"),
        ("unknown",),
        ("mpirun", "-n", 2, "run", "--core_type", "dummy", "--mode", "disaggregated"),
        ("mpirun", "-n", 2, "run", "--core_type", "dummy", "--min_query_count", "fast"),
    ],
    ids=lambda words: " ".join(map(str, words[:3])),
)
def test_errors(one: Starter, words: Sequence[object]) -> None:
    """On a terminal in lines that fit; in a pipe each is one line, which can be searched."""
    fits(typed(one, *words).end(120), code=2)
    errors = typed(one, *words, pipe=True).end(120).must(2).err
    assert any(len(line) > 80 for line in errors.splitlines()), errors


def test_a_server(one: Starter) -> None:
    command = typed(one, "mpirun", "-n", 2, "serve", "--core_type", "dummy", "--port", 0, "--log_dir", "s")
    wait_until(lambda: "serving " in command.out, "ready", 120)
    found = re.search(r"http://[^;\s]+", command.out)
    assert found is not None
    load = ("--num_prompts", 4, "--input_len", 4, "--output_len", 2, "--url", found[0])
    fits(typed(one, "bench", "endpoint", *load).end(120))
    command.process.terminate()
    fits(command.end())


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("sweep", *DUMMY, "--core_options", "ttft_ms:1", "ttft_ms:2", "--max_batch_size", "8", "16"),
        ("ab", "--core_options ttft_ms:1", "--core_options ttft_ms:30", *DUMMY, "--pairs", 3),
        ("find-max-qps", *DUMMY, *SHORT, "--probe_duration", 1, "--tolerance", 0.5),
        (
            "advise",
            "--total_gpus",
            2,
            "--core_type",
            "dummy",
            "--max_output_len",
            4,
            "--max_batch_size",
            4,
            "--min_query_count",
            32,
            "--verify",
            2,
            "--goodput",
            "ttft:500",
        ),
    ],
    ids=lambda words: str(words[0]),
)
def test_several_runs(one: Starter, words: Sequence[object]) -> None:
    fits(typed(one, *words, "--log_dir", "several").end(600))


def test_a_path_is_not_broken(one: Starter, tmp_path: Path) -> None:
    """It can be copied from a terminal of any width."""
    folder = tmp_path / ("long-" * 20)
    ended = typed(one, "mpirun", "-n", 2, "run", "--core_type", "dummy", "--log_dir", folder).end(120)
    assert re.search(rf"^  page +{folder.name}/report.html$", ended.must(0).out, re.MULTILINE)
