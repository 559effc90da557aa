"""Clients of other people in LoadGen's place (`run --harness`), against our endpoint and against vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.official_checker import INFERENCE, check_submission, listed
from tests.helpers.peer_programs import TIMEOUT_S, VLLM, Program, Show, peer_environment
from tests.helpers.support import DONE, TEST_FAILED, Starter

pytestmark = pytest.mark.peers

N, OUTPUT = 64, 32
DATA: list[object] = ["--dataset", "synthetic", "--num_samples", N, "--input_mean", 32]
DATA += ["--output_mean", OUTPUT, "--max_output_len", OUTPUT]
LOADS = {
    "offline": (),
    "poisson": ("--scenarios", "Server", "--server_target_qps", 20, "--min_query_count", 100),
    "concurrency": ("--concurrency", 8),
}
CLIENT = "inference-endpoint"
CLIENTS = {CLIENT: CLIENT, "aiperf": "aiperf", "guidellm": "guidellm"}
CLIENTS["vllm-bench"] = "vllm"


@pytest.fixture(autouse=True)
def in_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have other people's programs in PATH, and vLLM's settings for CPUs in the environment."""
    for name in ("PATH", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_NUM_OF_RESERVED_CPU", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, peer_environment()[name])
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.fixture(params=CLIENTS)
def harness(request: pytest.FixtureRequest, program: Program) -> str:
    name = str(request.param)
    if name == CLIENT:  # of no package index: wherever it is
        if not shutil.which(name):
            pytest.skip("there is no inference-endpoint in PATH")
    else:
        program(CLIENTS[name])
    return name


def summary(result: dict[str, object]) -> str:
    client, first = result["harness"], result["ttft_ms"]
    assert isinstance(client, dict) and isinstance(first, dict)
    return f"{client['name']} {client['version']}: first token p50 {first['p50']:.1f} ms"


@pytest.mark.parametrize("load", LOADS)
def test_our_endpoint(harness: str, load: str, model: Path, one: Starter, show: Show) -> None:
    """All requests are answered, and its figures are those that are made of its records."""
    options = ("--harness", harness, "--model_path", model, "--core_options", "ttft_ms:20,tpot_ms:5")
    ended = one.start(2, *DATA, *options, *LOADS[load], core="dummy").end(TIMEOUT_S).must(DONE)
    result = ended.result
    n = 100 if load == "poisson" else N
    assert result["harness"]["completed"] == result["harness"]["asked"] == result["samples"] == n
    assert result["errors"] == 0 and not [one_ for one_ in result["doubts"] if harness in one_]
    assert result["endpoint"]["samples"] >= n
    reported, made = result["harness"], result
    for name in ("ttft_ms", "latency_ms"):
        assert made[name]["mean"] == pytest.approx(reported[name]["mean"], rel=0.02)
        assert made[name]["mean"] >= result["endpoint"][name]["mean"]
    assert abs(result["tokens"] - n * OUTPUT) <= (0 if harness != "vllm-bench" else n)
    show(f"{load}: {summary(result)}, at the endpoint {result['endpoint']['ttft_ms']['p50']:.1f} ms")


@pytest.mark.parametrize("division", ["closed", "open"])
def test_a_result_of_its_runs(division: str, model: Path, one: Starter, show: Show) -> None:
    """The client's files of an accuracy and a performance run make a result that lacks only size."""
    if not shutil.which(CLIENT):
        pytest.skip("there is no inference-endpoint in PATH")
    pytest.importorskip("rouge_score")
    options: list[object] = ["--harness", CLIENT, "--model_path", model, "--core_options", "ttft_ms:20"]
    options += ["--benchmarks", "llama3.1-8b", "--model_scale", "tiny", "--round", "v6.1"]
    runs = []
    for kind, more in (("performance", ()), ("accuracy", ("--test_mode", "AccuracyOnly"))):
        runs.append(one.folder / kind)
        one.start(2, *options, *more, core="dummy", log_dir=runs[-1]).end(TIMEOUT_S).must(DONE)
    one.mpillm("accuracy", runs[1]).must(DONE)
    where = ("--output", one.folder / "out", "--submitter", "Us", "--system_name", "box")
    output = one.mpillm("submission", *runs, *where, "--division", division).must(TEST_FAILED).out
    found = {check for *_, check in listed(output)}
    lacks = {"scenarios_check"} if division == "closed" else set()
    assert found == {"min_duration_check", "dataset_check", *lacks}, output
    if INFERENCE:
        verdict = check_submission(one.folder / "out")
        assert verdict.failed == listed(output), verdict.log
    show(f"{division}: {', '.join(sorted(found))}")


def test_vllm(harness: str, model: Path, program: Program, one: Starter, show: Show) -> None:
    """The ranks start vLLM, and the client sends its requests to it directly."""
    program("vllm")
    options = ("--harness", harness, "--model_path", model, "--dtype", "float32", "--concurrency", 4)
    data = ("--num_samples", 16, "--min_query_count", 16)
    command = one.start(2, *DATA, *data, *options, *VLLM, core="trtllm_endpoint")
    ended = command.end(TIMEOUT_S).must(DONE)
    result = ended.result
    assert "straight to the server" in ended.out and "endpoint" not in result
    assert (result["harness"]["completed"], result["errors"]) == (16, 0)
    (served,) = result["per_instance"]
    assert served["server_generated_tokens"] >= result["tokens"] > 0
    counted = f"{result['tokens']} tokens, by its own count {served['server_generated_tokens']}"
    show(f"vLLM: {summary(result)}, {counted}")
