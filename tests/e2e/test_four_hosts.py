"""Runs on four hosts, each with one worker (make test-hosts, as root)."""

from __future__ import annotations

import os
import signal

import pytest

from tests.helpers.clusters import OnHosts, python_on
from tests.helpers.support import DONE, Ended, wait_until

pytestmark = pytest.mark.hosts

N_HOSTS = 4
WITHIN_S = 120.0  # hosts that share two cores start slowly
WHERE = "h1:2,h2:1,h3:1,h4:1"  # rank 0 controls
MODEL = ["--model_path", "tiny-llama", "--num_threads", 1, "--device", "cpu"]
FEW = ["--min_query_count", 16, "--max_output_len", 24, "--save_outputs"]
TWICE_OVER_TWO = ["--tensor_parallelism", 2]


def check_answers(on: OnHosts, ended: Ended) -> None:
    """Check that the answers are those of one worker on one host."""
    folder = on.starter.folder / "alone"
    alone = on.starter.run(2, *MODEL, *FEW, core="torch", log_dir=folder, timeout=WITHIN_S).must(DONE)
    outputs, wanted = (
        sorted((line["index"], line["output_tokens"]) for line in one.outputs()) for one in (ended, alone)
    )
    assert outputs == wanted and len(wanted) == 16, "every sample once, with the same tokens"


@pytest.mark.parametrize(
    "layout",
    [TWICE_OVER_TWO, ["--mode", "disaggregated"], ["--mode", "disaggregated", "--gen_pp_size", 3]],
    ids=["two instances over two hosts each", "one context, three generation", "a pipeline over three hosts"],
)
def test_answers_are_those_of_one_host(on_hosts: OnHosts, layout: list[object]) -> None:
    ended = on_hosts.start(WHERE, "run", "--core_type", "torch", *MODEL, *FEW, *layout).end(WITHIN_S)
    ended.must(DONE)
    assert [rank["node"] for rank in ended.json("plan.json")["ranks"]] == ["h1", "h1", "h2", "h3", "h4"]
    check_answers(on_hosts, ended)


def test_an_instance_of_two_hosts_is_lost(on_hosts: OnHosts) -> None:
    """The other one answers what it owed."""
    go_on = ["--on_instance_loss", "continue", "--max_batch_size", 2]
    command = on_hosts.start(WHERE, "run", "--core_type", "torch", *MODEL, *FEW, *TWICE_OVER_TWO, *go_on)
    command.wait_phase("test")
    for pid in wait_until(lambda: python_on(on_hosts.hosts, "h4", "run"), "the rank of h4"):
        os.kill(pid, signal.SIGKILL)
    ended = command.end(WITHIN_S).must(DONE)
    check_answers(on_hosts, ended)
    assert [lost["instance"] for lost in ended.result["lost"]] == [1], ended
