"""Runs that go well: every sample is answered once, with its own tokens, and the run directory holds what the
design says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.answers import check_each_index_once, check_outputs
from tests.helpers.support import DONE, ROOT, TEST_FAILED, Samples, Starter, make_samples


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
@pytest.mark.parametrize("ranks", [*(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4)), 5, 8])
def test_every_sample_once_with_its_tokens(both: Starter, samples: Samples, ranks: int, mode: str) -> None:
    """LoadGen's accuracy log of an Offline test is complete, with harness and leader on one rank and on two
    (of 5)."""
    control = 2 if ranks == 5 else 1
    options = [
        "--control_ranks",
        control,
        "--mode",
        mode,
        "--test_mode",
        "AccuracyOnly",
        "--dataset_path",
        samples.path,
        "--max_output_len",
        9,
        "--save_outputs",
    ]
    ended = both.run(ranks, *options)
    check_outputs(ended, samples, 9)
    check_each_index_once(ended, samples, 9)
    result = ended.result
    assert (result["status"], result["world_size"], result["mode"], result["errors"]) == (
        "VALID",
        ranks,
        mode,
        0,
    )
    assert len(result["per_instance"]) == ranks - control
    if mode == "aggregated":
        assert sum(instance["samples"] for instance in result["per_instance"]) == len(samples.prompts)
    for rank in range(ranks):
        log = (ended.log_dir / f"ranks/rank_{rank:04d}.log").read_text()
        assert "when idle, this rank sleeps until a wake-up" in log


@pytest.mark.parametrize(
    ("mpi", "ranks", "mode", "core_options"),
    [
        ("openmpi", 5, "aggregated", "ttft_ms:4,tpot_ms:30"),
        ("openmpi", 5, "disaggregated", "ttft_ms:4,tpot_ms:30,kv_bytes_per_token:100"),
        ("openmpi", 3, "disaggregated", ""),
        ("mpich", 5, "disaggregated", "ttft_ms:4,tpot_ms:30,kv_bytes_per_token:100"),
    ],
    indirect=["mpi"],
)
def test_server(both: Starter, samples: Samples, ranks: int, mode: str, core_options: str) -> None:
    options = [
        "--mode",
        mode,
        "--scenarios",
        "Server",
        "--server_target_qps",
        300,
        "--min_query_count",
        600,
        "--max_output_len",
        6,
    ]
    ended = both.run(
        ranks,
        *options,
        "--dataset_path",
        samples.path,
        "--core_options",
        core_options,
        "--save_outputs",
        "--require_valid",
    )
    loadgen = ended.loadgen()
    check_outputs(ended, samples, 6, loadgen["generated_query_count"])
    assert loadgen["generated_query_count"] >= 600
    assert loadgen["requested_use_token_latencies"] is True
    assert loadgen["result_validity"] == ended.result["loadgen_result"] == ended.result["status"] == "VALID"
    assert loadgen["num_errors"] == 0
    first, total = loadgen["result_first_token_mean_latency_ns"], loadgen["result_mean_latency_ns"]
    assert first < total
    if core_options:
        # The first token takes 4 ms, and the five others 30 ms each; half of that, because a busy machine
        # looks at the first token late.
        ttft, tpot = ended.result["ttft_ms"], ended.result["tpot_ms"]
        assert 3.99 < ttft["p50"] <= ttft["p90"] <= ttft["p99"]
        assert 15 < tpot["p50"] <= tpot["p90"] <= tpot["p99"]
        # LoadGen's own view of both: they were reported separately, and with their token counts.
        assert first > 3.99e6
        assert total - first > 0.5 * 5 * 30e6
        assert 15e6 < loadgen["result_time_to_output_token_mean"] < 1.01 * (total - first) / 5


def test_answers_that_overtake_the_context_instance(both: Starter, tmp_path: Path) -> None:
    """A generation instance has answered before the context instance notices that the KV cache has left: the
    id is not free yet."""
    samples = make_samples(tmp_path / "samples.jsonl", [50] * 50)
    # KV caches of a megabyte: no MPI sends that eagerly, so it is the sender's next look that ends it.
    options = [
        "--mode",
        "disaggregated",
        "--scenarios",
        "Server",
        "--server_target_qps",
        150,
        "--min_query_count",
        150,
    ]
    options += [
        "--core_options",
        "kv_bytes_per_token:20000",
        "--dataset_path",
        samples.path,
        "--max_output_len",
        3,
        "--save_outputs",
    ]
    ended = both.run(
        3, *options, core="tests.helpers.plugin_cores:SlowContext", env={"PYTHONPATH": str(ROOT)}
    )
    ended.must(DONE)
    check_outputs(ended, samples, 3, ended.loadgen()["generated_query_count"])


def test_a_handoff_between_instances_of_several_ranks(both: Starter, samples: Samples) -> None:
    """The dummy's KV cache moves from leader to leader; the other ranks have nothing to do."""
    options = [
        "--mode",
        "disaggregated",
        "--ctx_tp_size",
        2,
        "--gen_pp_size",
        2,
        "--num_gen_servers",
        2,
        "--max_output_len",
        3,
    ]
    ended = both.run(
        8,
        *options,
        "--core_options",
        "kv_bytes_per_token:1000",
        "--dataset_path",
        samples.path,
        "--save_outputs",
    )
    check_outputs(ended, samples, 3)
    context, *generations = ended.result["per_instance"]
    assert context["kv_bytes"] == sum(1000 * len(prompt) for prompt in samples.prompts)
    assert context["samples"] == sum(instance["samples"] for instance in generations) == len(samples.prompts)


@pytest.mark.parametrize(
    ("mpi", "mode"), [("openmpi", "disaggregated"), ("mpich", "aggregated")], indirect=["mpi"]
)
def test_single_stream(both: Starter, samples: Samples, mode: str) -> None:
    options = [
        "--mode",
        mode,
        "--scenarios",
        "SingleStream",
        "--dataset_path",
        samples.path,
        "--max_output_len",
        5,
        "--save_outputs",
    ]
    ended = both.run(4, *options, "--core_options", "ttft_ms:1,tpot_ms:0.1", "--min_query_count", 300)
    check_outputs(ended, samples, 5, ended.loadgen()["result_query_count"])
    assert ended.result["scenario"] == "SingleStream"
    assert ended.loadgen()["result_query_count"] >= 300


def test_offline_performance_repeats_the_data_set(one: Starter, samples: Samples) -> None:
    n = 3 * len(samples.prompts)
    options = [
        "--dataset_path",
        samples.path,
        "--min_query_count",
        n,
        "--max_output_len",
        3,
        "--save_outputs",
    ]
    ended = one.run(3, *options)
    check_outputs(ended, samples, 3, n)
    assert ended.loadgen()["effective_samples_per_query"] == n
    assert set(Counter(line["index"] for line in ended.outputs()).values()) == {3}


@pytest.mark.parametrize(
    "policy",  # how each chooses, tests/unit/roles says
    ["load_balancing", pytest.param("round_robin", marks=pytest.mark.slow), "kv_cache_aware"],
)
@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_small_credits(one: Starter, samples: Samples, mode: str, policy: str) -> None:
    """With two requests at a time in each instance and little KV cache, everything waits at the leader, and
    nothing is lost."""
    options = [
        "--mode",
        mode,
        "--traffic_distribution_policy",
        policy,
        "--max_batch_size",
        2,
        "--kv_cache_tokens",
        40_000,
    ]
    timed = "ttft_ms:0.5,tpot_ms:0.1,kv_bytes_per_token:2000"
    ended = one.run(
        6,
        *options,
        "--core_options",
        timed,
        "--dataset_path",
        samples.path,
        "--max_output_len",
        4,
        "--save_outputs",
    )
    check_outputs(ended, samples, 4)
    shares = [instance["samples"] for instance in ended.result["per_instance"]]
    # Not that shares are even: who has a credit when its turn comes depends on the machine (see
    # tests/unit/roles/test_routing.py).
    assert min(shares) > 0


def test_answer_lengths_by_distribution(one: Starter, samples: Samples) -> None:
    """The same request has the same length wherever it runs, so context and generation instances must agree.

    One token needs no handoff.
    """
    core_options = "output_mean:3,output_stdev:3,ttft_ms:0.2,tpot_ms:0.1"
    options = [
        "--core_options",
        core_options,
        "--max_output_len",
        7,
        "--dataset_path",
        samples.path,
        "--save_outputs",
        "--num_ctx_servers",
        2,
    ]
    ended = one.run(6, "--mode", "disaggregated", *options)
    ended.must(DONE)
    outputs = ended.outputs()
    assert sorted(line["index"] for line in outputs) == list(range(len(samples.prompts)))
    lengths = Counter(len(line["output_tokens"]) for line in outputs)
    assert set(lengths) == set(range(1, 8))
    for line in outputs:
        assert line["output_tokens"] == samples.answer(line["index"], len(line["output_tokens"]))
    result = ended.result
    assert result["tokens"] == sum(len(line["output_tokens"]) for line in outputs)
    assert sum(instance["tokens"] for instance in result["per_instance"]) == result["tokens"]
    # Nothing was generated elsewhere for answers of one token.
    assert sum(instance["samples"] for instance in result["per_instance"][2:]) == len(outputs) - lengths[1]


@pytest.mark.parametrize("core_options", ["", "ttft_ms:1,tpot_ms:0.2"])
def test_one_rank_alone(both: Starter, samples: Samples, core_options: str) -> None:
    options = [
        "--dataset_path",
        samples.path,
        "--max_output_len",
        4,
        "--save_outputs",
        "--core_options",
        core_options,
    ]
    ended = both.run(1, *options, "--test_mode", "AccuracyOnly")
    check_outputs(ended, samples, 4)
    check_each_index_once(ended, samples, 4)


@pytest.mark.smoke
def test_a_given_yaml_and_hyphens(both: Starter, samples: Samples, tmp_path: Path) -> None:
    """Two context and three generation instances run, one of them on two ranks.

    Options may have hyphens and an equals sign.
    """
    made = both.mpillm(
        *(
            "generate-disagg-config",
            "--mode",
            "disaggregated",
            "--num-ctx-servers",
            2,
            "--ctx-tp-size=2",
            "--num-gen-servers",
            3,
        ),
        *("--max-batch-size", 3, "--output", tmp_path / "disagg.yaml"),
    )
    made.must(DONE)
    options = [
        "--disagg-config",
        tmp_path / "disagg.yaml",
        f"--dataset-path={samples.path}",
        "--max-output-len=5",
        "--save-outputs=true",
    ]
    ended = both.run(8, *options, "--test-mode", "accuracyonly", "--core-options", "ttft_ms:0.3,tpot_ms:0.1")
    check_outputs(ended, samples, 5)
    check_each_index_once(ended, samples, 5)
    assert [rank["roles"] for rank in ended.json("plan.json")["ranks"]] == [
        ["harness", "leader"],
        *[["ctx"]] * 4,
        *[["gen"]] * 3,
    ]
    assert len(ended.result["per_instance"]) == 5


def test_an_invalid_result_is_an_error_on_demand(one: Starter, tmp_path: Path) -> None:
    """LoadGen says INVALID for a latency limit that can't be held."""
    conf = tmp_path / "user.conf"
    conf.write_text("*.Server.target_latency = 1\n*.Server.ttft_latency = 1\n*.Server.tpot_latency = 1\n")
    options = [
        "--scenarios",
        "Server",
        "--server_target_qps",
        200,
        "--min_query_count",
        100,
        "--user_conf",
        conf,
        "--min_duration",
        0,
    ]
    options += ["--core_options", "ttft_ms:20,tpot_ms:20", "--max_output_len", 4]
    ended = one.run(3, *options)
    ended.must(DONE)
    assert (
        ended.result["status"]
        == ended.result["loadgen_result"]
        == ended.loadgen()["result_validity"]
        == "INVALID"
    )
    ended = one.run(3, *options, "--require_valid")
    ended.must(TEST_FAILED)
    assert ended.result["loadgen_result"] == "INVALID"


def test_min_duration(one: Starter, samples: Samples) -> None:
    options = [
        "--scenarios",
        "Server",
        "--server_target_qps",
        100,
        "--min_duration",
        1.5,
        "--min_query_count",
        10,
        "--max_output_len",
        2,
    ]
    ended = one.run(3, *options, "--dataset_path", samples.path)
    ended.must(DONE)
    assert 1.3 < ended.result["test_s"] < 30
    assert ended.loadgen()["effective_min_duration_ms"] == 1500


def test_synthetic_data(one: Starter) -> None:
    """Prompt and answer lengths follow a distribution; the same seed gives the same samples."""
    options = [
        "--dataset",
        "synthetic",
        "--num_samples",
        50,
        "--input_mean",
        20,
        "--input_stdev",
        5,
        "--output_mean",
        6,
        "--output_stdev",
        2,
    ]
    ended = one.run(3, *options, "--save_outputs", "--seed", 7)
    ended.must(DONE)
    outputs = {line["index"]: line for line in ended.outputs()}
    assert set(outputs) == set(range(50))
    assert 17 < sum(len(line["input_tokens"]) for line in outputs.values()) / 50 < 23
    assert len({len(line["output_tokens"]) for line in outputs.values()}) > 2
    again = {line["index"]: line for line in one.run(3, *options, "--save_outputs", "--seed", 7).outputs()}
    assert again == outputs
