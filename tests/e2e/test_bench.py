"""The benchmarks that run on several ranks: they end, whatever happens, and say why."""

from __future__ import annotations

import pytest
from support import Starter

SMALL = ("--device", "cpu", "--models", "tiny-llama", "--prompt_lens", 64, "--mebibytes", 1, "--repeats", 1)


def test_a_handoff_is_measured(one: Starter) -> None:
    ended = one.mpillm("mpirun", "-n", 2, "bench", "handoff", *SMALL).must(0)
    assert "tiny-llama" in ended.out and "all are equal" in ended.out


def test_a_bench_that_takes_too_long(one: Starter) -> None:
    ended = one.mpillm("mpirun", "-n", 2, "bench", "agreement", "--device", "cpu", "--deadline", 0.1)
    assert ended.code not in (0, 2) and "not done after --deadline 0.1 s" in ended.err


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (3, ("handoff", "--device", "cpu"), "2 ranks are needed, mpirun -n 2; there are 3"),
        (2, ("handoff", "--device", "gpu"), "did you mean 'cpu'"),
    ],
)
def test_what_cannot_run_is_said_once(one: Starter, ranks: int, options: tuple[str, ...], message: str) -> None:
    assert message in one.mpillm("mpirun", "-n", ranks, "bench", *options).must(2).message
