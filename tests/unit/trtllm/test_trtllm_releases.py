"""TensorRT-LLM's cores against the stand-ins of other releases than the newest that was read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.comms.messages import RequestFlag, ResponseFlag
from tests.helpers.trtllm_cores import CORES, batch, rows_of
from tests.helpers.trtllm_records import NO_ENGINES, OLDEST, STAND_IN, WHOLE

Make = Callable[..., Any]
ENDED = ResponseFlag.FIRST | ResponseFlag.FINAL


@pytest.mark.parametrize(
    ("release", "name", "options"),
    [
        (NO_ENGINES, CORES[1], []),
        (WHOLE, CORES[0], []),
        (WHOLE, CORES[1], []),
        (WHOLE, CORES[1], ["--trtllm_runtime_flags=trtllm_backend:cpp"]),
        (OLDEST, CORES[0], []),
        (OLDEST, CORES[0], ["--core_options=orchestrator:true,worker_path:/opt/executorWorker"]),
    ],
)
def test_what_runs(
    make: Make, release: str, name: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that a core can call is in that release."""
    monkeypatch.setenv(STAND_IN, release)
    options += ["--scenarios=Server", "--enable_chunked_context=true"]
    core = make(name, *options, end_ids=(7, 8), kv_cache_tokens=256)
    core.enqueue(batch([1, 2, 3], temperature=0.5, top_k=3, top_p=0.25, seed=9, min_output=2))
    core.enqueue(batch([7, 3], id=1, flags=RequestFlag.STREAM))
    rows = rows_of(core, 2)
    assert [tokens for id_, flags, tokens in rows if flags & ResponseFlag.FINAL and id_ == 0] == [[3, 2, 1]]
    core.enqueue(batch([4]))
    core.cancel([0])
    assert [id_ for id_, *_ in rows_of(core, 1)] == [0]
    assert core.metrics() is not None


@pytest.mark.parametrize("name", CORES)
def test_a_release_without_engines(make: Make, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAND_IN, NO_ENGINES)
    flags = ["--trtllm_runtime_flags=trtllm_backend:cpp"] if name == CORES[1] else []
    with pytest.raises(
        ConfigError, match=rf"^--core_type {name}: TensorRT-LLM 1\.4\.0rc runs no engines; 1\.3\.0rc20 is"
    ):
        make(name, "--scenarios=Offline", *flags)


def test_flags_of_the_executor_in_0_20(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAND_IN, OLDEST)
    flags = "--trtllm_runtime_flags=cuda_graph_mode:true,enable_batch_size_tuning:true"
    assert make(CORES[0], "--scenarios=Offline", flags) is not None
    with pytest.raises(ConfigError, match=r"ExecutorConfig refuses.*fail_fast_on_attention_window_too_large"):
        late = "--trtllm_runtime_flags=fail_fast_on_attention_window_too_large:true"
        make(CORES[0], "--scenarios=Offline", late)


@pytest.mark.parametrize("backend", ["pytorch", "cpp"])
def test_the_llm_api_of_0_20_is_refused_by_name(
    make: Make, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STAND_IN, OLDEST)
    with pytest.raises(
        ConfigError,
        match=r"^--core_type trtllm_hlapi: TensorRT-LLM 0\.20 has another LLM class; use 1\.0 or later, or"
        r" --core_type trtllm_executor with an engine$",
    ):
        make(CORES[1], "--scenarios=Offline", f"--trtllm_runtime_flags=trtllm_backend:{backend}")
