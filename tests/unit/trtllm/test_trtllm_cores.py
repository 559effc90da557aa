"""TensorRT-LLM's two cores in one process, against a stand-in that refuses what the record of the real
interface does not have."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.comms.messages import RequestFlag, ResponseFlag
from mpillm.errors import RunError
from tests.helpers.support import wait_until
from tests.helpers.trtllm_cores import CORES, SINGLE, batch, rows_of

pytestmark = pytest.mark.usefixtures("stand_in")
FIRST, FINAL, CANCELLED = ResponseFlag.FIRST, ResponseFlag.FINAL, ResponseFlag.CANCELLED
REFUSED = 666
Make = Callable[..., Any]


@pytest.mark.parametrize("name", CORES)
def test_whole_answers_offline(make: Make, name: str) -> None:
    core = make(name, "--scenarios=Offline")
    core.enqueue(batch([1, 2, 3, 4, 5], [9, 8]))
    assert sorted(rows_of(core, 2)) == [(0, FIRST | FINAL, [5, 4, 3, 2]), (1, FIRST | FINAL, [8, 9])]
    assert not core.has_work()


@pytest.mark.parametrize("name", CORES)
def test_first_tokens_are_reported_if_loadgen_requires_them(make: Make, name: str) -> None:
    core = make(name, "--scenarios=Server")
    core.enqueue(batch([1, 2, 3, 4, 5], [9]))
    rows = rows_of(core, 2)
    assert [row for row in rows if row[0] == 0] == [(0, FIRST, [5]), (0, FINAL, [5, 4, 3, 2])]
    assert [row for row in rows if row[0] == 1] == [(1, FIRST | FINAL, [9])], (
        "a first token that ends the answer is reported once"
    )


@pytest.mark.parametrize("name", CORES)
def test_what_ends_an_answer(make: Make, name: str) -> None:
    core = make(name, "--scenarios=Offline", end_ids=(7, 8), stop_words=((6,),))
    core.enqueue(batch([1, 2, 7, 3], [1, 2, 8, 3], [1, 2, 6, 3]))
    assert [tokens for *_, tokens in sorted(rows_of(core, 3))] == [[3, 7], [3, 8], [3, 6]]
    core.enqueue(batch([1, 2, 7, 3], min_output=3))
    assert rows_of(core, 1) == [(0, FIRST | FINAL, [3, 7, 2, 1])], "no end before min_output"
    core.enqueue(batch([1, 2, 6, 3], flags=RequestFlag.IGNORE_STOP))
    assert rows_of(core, 1) == [(0, FIRST | FINAL, [3, 6, 2, 1])]
    core.enqueue(batch([1, 2, 7, 3], flags=RequestFlag.IGNORE_END))
    core.enqueue(batch([1, 2, 8, 3], flags=RequestFlag.IGNORE_END, id=1))
    assert [tokens for *_, tokens in sorted(rows_of(core, 2))] == [[3, 7, 2, 1], [3, 8, 2, 1]]


@pytest.mark.parametrize("name", CORES)
def test_tokens_as_they_come(make: Make, name: str) -> None:
    """A request that wants tokens as they come gets them in any scenario."""
    core = make(name, "--scenarios=Offline")
    core.enqueue(batch([1, 2, 3, 4], flags=RequestFlag.STREAM))
    first, *partial, last = rows_of(core, 1)
    assert (first, last) == ((0, FIRST, [4]), (0, FINAL, [4, 3, 2, 1]))
    assert all(flags == ResponseFlag.PARTIAL for _, flags, _ in partial)
    assert [token for *_, tokens in partial for token in tokens] == [3, 2]


@pytest.mark.parametrize("name", CORES)
def test_how_tokens_are_chosen_is_passed_on(make: Make, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make(name, "--scenarios=Offline")
    import tensorrt_llm  # the stand-in

    seen: list[dict[str, Any]] = []
    target = tensorrt_llm.EXECUTOR if name == "trtllm_executor" else core
    attribute = "SamplingConfig" if name == "trtllm_executor" else "_sampling"
    real = getattr(target, attribute)

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(
            {
                key: kwargs[key]
                for key in ("temperature", "top_k", "top_p", "seed", "min_tokens")
                if key in kwargs
            }
        )
        return real(*args, **kwargs)

    monkeypatch.setattr(target, attribute, noted)
    core.enqueue(batch([1]))
    core.enqueue(batch([1], id=1, temperature=0.5, top_k=3, top_p=0.25, seed=9, min_output=2))
    core.enqueue(batch([1], id=2, temperature=2.0))
    rows_of(core, 3)
    assert seen == [
        {"top_k": 1},
        {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 9, "min_tokens": 2},
        {"temperature": 2.0, "seed": 0},
    ]


@pytest.mark.parametrize("name", CORES)
def test_a_request_that_is_refused_ends_the_run_with_its_name(make: Make, name: str) -> None:
    core = make(name, "--scenarios=Offline")
    core.enqueue(batch([REFUSED, 2]))
    with pytest.raises(
        RunError, match=r"^TensorRT-LLM, request 0: a prompt that this (engine|model) refuses$"
    ):
        rows_of(core, 1)


@pytest.mark.parametrize("name", CORES)
def test_cancelling(make: Make, name: str) -> None:
    """Each request that has not ended gives one row, and an unknown id gives none."""
    core = make(name, "--scenarios=Server")
    core.enqueue(batch([*range(10, 50)], [3], max_output=40))
    core.cancel([0, 77])
    rows = rows_of(core, 2)
    assert [row for row in rows if FINAL in row[1] and row[0] == 0] == [(0, FINAL | CANCELLED, [])]
    assert (1, FIRST | FINAL, [3]) in rows
    core.cancel([0])
    core.enqueue(batch([5]))
    assert rows_of(core, 1) == [(0, FIRST | FINAL, [5])], "the id is free again"


@pytest.mark.parametrize("name", CORES)
def test_what_is_computed_and_held(make: Make, name: str) -> None:
    core = make(name, "--scenarios=Server")
    core.start_test()
    core.enqueue(batch([1, 2, 3, 4, 5], [9, 8]))
    rows_of(core, 2)
    metrics = core.metrics()
    assert metrics is not None
    assert metrics[:4] == (7, 6, 0, 0), "prompt tokens, answer tokens, and nothing is left"
    core.start_test()
    assert core.metrics() == (0, 0, 0, 0, 0.0)


def test_the_kv_cache_in_the_progress(make: Make) -> None:
    core = make("trtllm_executor", "--scenarios=Server")
    core.enqueue(batch(*([1, 2, 3],) * 6))
    assert core.has_work()
    metrics = core.metrics()
    assert metrics is not None
    assert (metrics.running, metrics.waiting, metrics.kv_cache_usage) == (4, 2, 0.5)
    rows_of(core, 6)


def test_statistics_of_the_llm_api(make: Make) -> None:
    core = make("trtllm_hlapi", "--scenarios=Server")
    core._llm._open = 16  # the stand-in has a cache of 64 blocks, of which each open request holds one
    wait_until(lambda: core._now[0], "statistics")
    core.enqueue(batch([*range(10, 60)], max_output=50))
    assert core.metrics()[2:] == (16, 0, 0.25)
    rows_of(core, 1)


@pytest.mark.parametrize("name", CORES)
def test_credits_follow_the_engine(make: Make, name: str) -> None:
    assert make(name, "--scenarios=Offline").credits().requests == 8
    assert make(name, "--scenarios=Offline", kv_cache_tokens=256).credits().tokens == 256


@pytest.mark.parametrize("name", CORES)
def test_limits_before_anything_is_loaded(make: Make, name: str) -> None:
    assert make(name, "--enable_chunked_context=true", check=True) == (1000, 64, None)
    assert "tensorrt_llm" not in sys.modules, "a check must not wait for other ranks, as the import does"


def test_a_prompt_longer_than_a_step_needs_chunked_context(make: Make) -> None:
    assert make("trtllm_executor", "--enable_chunked_context=false", check=True, max_num_tokens=99) == (
        1000,
        64,
        32,
    )
    assert make("trtllm_hlapi", "--enable_chunked_context=false", check=True, max_num_tokens=24) == (
        1000,
        64,
        24,
    )


@pytest.mark.parametrize(
    ("name", "options", "more", "message"),
    [
        (
            CORES[0],
            ["--core_options=orchestator:true"],
            {},
            r"no such option \(did you mean 'orchestrator'\?\)",
        ),
        (CORES[0], ["--core_options=orchestrator:true"], {}, r"orchestrator:true needs worker_path:PATH"),
        (CORES[0], ["--core_options=orchestrator:maybe"], {}, "expected true or false"),
        (CORES[0], ["--trtllm_runtime_flags=exclude_input_from_output:false"], {}, "answers without prompts"),
        (CORES[1], [], {"stop_words": ((1, 2),)}, "stop words of one token"),
        (CORES[1], ["--trtllm_runtime_flags=trtllm_backend:tensorflow"], {}, "not one of pytorch, cpp"),
        *((name, [], {"stop_words": ("###",)}, "give it as an array of token ids") for name in CORES),
        *((name, [], {"role": "context"}, "hands over no KV cache") for name in CORES),
        *((name, [], {"beam_width": 2}, "answers with one beam") for name in CORES),
    ],
)
def test_what_cannot_be(
    make: Make, name: str, options: list[str], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, *options, check=True, **more)


def test_an_engine_without_end_tokens_is_refused(make: Make, folder: Path) -> None:
    make("trtllm_executor", check=True, end_ids=None)  # those of the model's config.json
    (folder / "config.json").write_text(json.dumps({"build_config": {}, "pretrained_config": {}}))
    with pytest.raises(ConfigError, match="nothing says which tokens end an answer; give --end_ids"):
        make("trtllm_executor", check=True, end_ids=None)


@pytest.mark.parametrize("name", CORES)
def test_without_the_library(make: Make, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)  # its import fails
    with pytest.raises(
        ConfigError,
        match=rf"^--core_type {name} needs the package 'tensorrt_llm': pip install 'mpillm\[trtllm\]'",
    ):
        make(name, check=True)


# --- flags ---


def test_flags_reach_the_executor(make: Make) -> None:
    core = make(
        "trtllm_executor",
        "--scenarios=Offline",
        "--trtllm_runtime_flags=cuda_graph_mode:true,enable_batch_size_tuning:true,gpu_weights_percent:0.5,use_inflight_batching:false",
        enable_chunked_context=True,
    )
    made = core._executor._values["executor_config"]._values
    assert made["extended_runtime_perf_knob_config"].cuda_graph_mode is True
    assert made["gpu_weights_percent"] == 0.5
    assert made["batching_type"].name == "STATIC"
    assert made["max_batch_size"] == 4, "the engine's"
    scheduler = made["scheduler_config"]
    assert scheduler.dynamic_batch_config.enable_batch_size_tuning is True
    assert (scheduler.capacity_scheduler_policy.name, scheduler.context_chunking_policy.name) == (
        "MAX_UTILIZATION",
        "FIRST_COME_FIRST_SERVED",
    )


def test_a_flag_that_the_library_lacks(make: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"^trtllm_runtime_flags cuda_graph_mod: TensorRT-LLM's ExecutorConfig refuses"
    ):
        make("trtllm_executor", "--scenarios=Offline", "--trtllm_runtime_flags=cuda_graph_mod:true")
    with pytest.raises(ValueError, match="LLM got invalid argument: cuda_graph_confg"):
        make("trtllm_hlapi", "--scenarios=Offline", "--trtllm_runtime_flags=cuda_graph_confg:true")


def test_the_tensorrt_backend_of_the_llm_api(make: Make) -> None:
    core = make(
        "trtllm_hlapi", "--scenarios=Offline", "--trtllm_runtime_flags=trtllm_backend:cpp", max_batch_size=64
    )
    assert type(core._llm).__name__ == "TrtLLM"
    assert (core._arguments()["max_batch_size"], core._arguments()["max_num_tokens"]) == (4, 32), (
        "the engine's"
    )
    core.enqueue(batch([1, 2]))
    assert rows_of(core, 1) == [(0, FIRST | FINAL, [2, 1])]


def test_a_world_of_one_rank_starts_no_process(make: Make) -> None:
    make("trtllm_hlapi", "--scenarios=Offline")
    assert os.environ[SINGLE] == "1"


def test_orchestrator_mode(make: Make) -> None:
    core = make(
        "trtllm_executor",
        "--scenarios=Offline",
        "--core_options=orchestrator:true,worker_path:/opt/executorWorker",
    )
    parallel = core._executor._values["executor_config"].parallel_config
    assert parallel.communication_mode.name == "ORCHESTRATOR"
    assert parallel.orchestrator_config.worker_executable_path == "/opt/executorWorker"


# --- the stand-in itself: what the real library refuses is refused here ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tle: tle.Request([1], 2, stream=True), "incompatible arguments"),
        (lambda tle: tle.Request([1]), "incompatible arguments"),
        (lambda tle: tle.Request([1], 2, True), "incompatible arguments"),
        (lambda tle: tle.SamplingConfig(1, 5), "incompatible arguments"),
        (lambda tle: tle.DynamicBatchConfig(True), "incompatible arguments"),
        (lambda tle: tle.BatchingType.V1, "V1"),
        (lambda tle: setattr(tle.ExtendedRuntimePerfKnobConfig(), "graphs", 1), "no attribute 'graphs'"),
        (lambda tle: tle.Result().tokens, "no attribute 'tokens'"),
        (lambda tle: tle.GptSession, "GptSession"),
    ],
)
def test_the_stand_in_refuses(call: Callable[[Any], object], message: str) -> None:
    import tensorrt_llm

    with pytest.raises((TypeError, AttributeError), match=message):
        call(tensorrt_llm.EXECUTOR)


def test_the_stand_in_of_the_llm_api_refuses() -> None:
    import tensorrt_llm

    with pytest.raises(TypeError, match="max_new_tokens"):
        tensorrt_llm.SamplingParams(max_new_tokens=3)
    with pytest.raises(ValueError, match="fraction"):
        tensorrt_llm.llmapi.KvCacheConfig(fraction=0.5)
    with pytest.raises(TypeError, match="incompatible arguments"):
        tensorrt_llm.set_mpi_comm(comm=None)
