"""In which rounds a workload counts, and what --round makes of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from disagg.errors import ConfigError
from mpillm import workloads
from mpillm.loadgen.settings import LoadGenConfig
from mpillm.options.options import parse_run
from mpillm.workloads.rounds import ROUNDS, round_named, round_of, why_not


@pytest.mark.parametrize(
    ("name", "target", "of_round", "why"),
    [
        ("llama3.1-8b", 0.99, "v6.1", ""),
        ("llama3.1-8b-interactive", 0.99, "v6.0", ""),
        ("llama2-70b", 0.999, "v6.1", ""),
        ("llama2-70b", 0.99, "v6.0", ""),
        ("llama2-70b", 0.99, "v6.1", "round v6.1 has llama2-70b-99.9 only (--accuracy_target)"),
        (
            "llama2-70b",
            0.995,
            "v6.0",
            "round v6.0 has llama2-70b-99 and llama2-70b-99.9 only (--accuracy_target)",
        ),
        ("mixtral-8x7b", 0.99, "v6.1", "mixtral-8x7b is retired: v6.0 was its last round"),
        ("llama3.1-405b-interactive", 0.99, "v6.1", "llama3.1-405b is retired: v6.0 was its last round"),
    ],
)
def test_why_not(name: str, target: float, of_round: str, why: str) -> None:
    assert why_not(workloads.get(name), target, of_round) == why


def test_rounds_are_found_by_their_seeds() -> None:
    assert [round_of(r.seeds) for r in ROUNDS] == list(ROUNDS) and round_of((1, 2, 3)) is None
    assert [round_named(r.name) for r in ROUNDS] == list(ROUNDS)


def test_a_round_without_the_workload_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--round v6\.1: mixtral-8x7b is retired: v6\.0 was its last"
    ) as error:
        LoadGenConfig.from_run(parse_run(["--benchmarks", "mixtral-8x7b", "--round", "v6.1"]))
    assert "round" in error.value.about
    assert LoadGenConfig.from_run(parse_run(["--benchmarks", "mixtral-8x7b"])).round is None


@pytest.mark.parametrize("of_round", ["v6.0", "v6.1", None])
def test_loadgen_has_the_rounds_seeds(of_round: str | None) -> None:
    """In a process of its own, because LoadGen reads its own values once in a process."""
    script = (
        "import json, sys\nfrom mpillm.options.options import parse_run\n"
        "from mpillm.loadgen.settings import LoadGenConfig, load_settings\n"
        "s = load_settings(LoadGenConfig.from_run(parse_run(sys.argv[1:])), 13368)\n"
        "t, name = s.test, s.to_json()['round']\n"
        "print(json.dumps([t.qsl_rng_seed, t.sample_index_rng_seed, t.schedule_rng_seed, name]))"
    )
    words = ["--benchmarks", "llama3.1-8b", *(["--round", of_round] if of_round else [])]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *seeds, name = json.loads(done.stdout)
    assert name == (of_round or name) and seeds == list(round_named(name).seeds)
