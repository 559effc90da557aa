"""What is wrong with a series of runs is said before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpillm.cli import main
from mpillm.experiments.commands import find_max_qps

DUMMY = ("-n", "2", "--core_type", "dummy")
TALKS = (*DUMMY, "--harness", "conversations", "--dataset_path", "talks.jsonl")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("find-max-qps", *DUMMY), "every rate is VALID: give --goodput ttft:500 tpot:50"),
        (
            ("find-max-qps", *DUMMY, "--scenarios", "Offline", "--goodput", "ttft:5"),
            "--goodput ttft:5 has no effect in scenario Offline",
        ),
        (
            ("find-max-qps", *TALKS),
            "--harness conversations: LoadGen does not judge it; give latency limits in milliseconds:"
            " --goodput ttft:500 tpot:50",
        ),
        (
            ("find-max-qps", *TALKS, "--goodput", "ttft:5", "--num_conversations", "9"),
            "--num_conversations 9: find-max-qps sets it, from each rate and from --min_duration; leave",
        ),
        (
            ("find-max-qps", *TALKS, "--goodput", "ttft:5", "--scenarios", "Offline"),
            "only Server and Interactive have a rate to search for",
        ),
        (
            ("find-max-qps", *DUMMY, "--harness", "aiperf", "--goodput", "ttft:5"),
            "--harness aiperf: find-max-qps goes by LoadGen's verdicts",
        ),
        (("find-max-qps", *DUMMY, "--goodput"), "--goodput: expected at least one argument"),
        (
            ("find-max-qps", *DUMMY, "--goodput", "ttft:5", "--max_batch", "4"),
            "mpillm find-max-qps: unknown option --max_batch",
        ),
        (("advise", "--repeat", "3"), "mpillm advise: unknown option --repeat (did you mean '--repeats'?)"),
        (("advise", "-n", "3"), "mpillm advise: unknown option -n (did you mean '--total_gpus'?)"),
        (("advise", "--max_batch_size"), "mpillm advise: argument --max_batch_size: expected one argument"),
        (("sweep", "--max_batch_size", "4", "8", "--x", "y"), "mpillm sweep: unknown option --x"),
        (("ab", "", "--x", *DUMMY), "mpillm ab: unknown option --x"),
        (("selftest", "--x"), "mpillm selftest: unknown option --x"),
        (("find-max-qps", *DUMMY, "--goodput", "ttft:5", "--tolerance", "0"), "--tolerance"),
        (("ab", "--max_batch_size 4"), "expected two sets of options first"),
        (("ab", "--pairs", "5", "", ""), "expected two sets of options first"),
        (("ab", "", "--seed 'x", *DUMMY), "No closing quotation"),
        (
            ("ab", "", "--scenarios Server --server_target_qps 9", *DUMMY),
            "A is scenario Offline, B is",
        ),
        (("ab", "", "--max_batch_size 0", *DUMMY), "--max_batch_size"),
        (
            ("ab", "", "", *DUMMY, "--metric", "e2e_avg_interactivity"),
            "--metric e2e_avg_interactivity needs --harness conversations",
        ),
        (
            ("ab", "", "", *TALKS, "--metric", "good_conversations_per_second"),
            "--metric good_conversations_per_second needs limits: --goodput ttft:500 tpot:50",
        ),
        (("ab", "", "", *DUMMY, "--pairs", "2"), "--pairs 2: three or more"),
        (("advise", *DUMMY[2:], "--total_gpus", "0"), "--total_gpus"),
        (("advise", *DUMMY[2:], "--tensor_parallelism", "2"), "advise proposes it; leave it out"),
        (("advise", *DUMMY[2:], "--goodput", "itl:5"), "no latency 'itl'"),
        (("advise", "--core_type", "trtllm_endpoint"), "its servers have their own layout"),
        (("advise", "--model_path", "tiny-llama", "--scenarios", "Server"), "needs --server_target_qps"),
        (("advise", *DUMMY[2:], "--test_mode", "AccuracyOnly"), "advise only supports performance tests"),
        (("advise", *DUMMY[2:], "--scenarios", "SingleStream"), "only Offline and Server"),
    ],
)
def test_wrong_options_fail_before_the_first_run(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.count("mpillm:") == 1 and output.out == ""
    assert not [*tmp_path.iterdir()]


def test_a_core_that_does_not_tell_its_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    core = "tests.helpers.plugin_torch_cores:Silent"
    assert main(["advise", "--model_path", "tiny-llama", "--core_type", core]) == 2
    assert f"{core}: it does not report the contents and times of its steps" in capsys.readouterr().err


def test_that_each_test_starts_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fifteen starts of a server that takes minutes are more than the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(find_max_qps, "_search", lambda *_: 0)
    words = ["find-max-qps", "-n", "2", "--goodput", "ttft:500"]
    for server in (["--server", "vllm", "--model_path", "tiny-llama"], ["--core_type", "dummy"]):
        assert main([*words, *server]) == 0
        out = capsys.readouterr().out
        assert ("each test starts vllm again" in out) == ("--server" in server)
        assert all(len(line) <= 80 for line in out.splitlines())
