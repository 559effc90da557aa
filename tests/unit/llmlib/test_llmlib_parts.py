"""Cores, servers, warm-ups and data sets in NVIDIA's words, without ranks."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.cores.base import CoreConfig
from mpillm.cores.registry import BackendRegistry
from mpillm.llmlib import (
    HarnessConfig,
    LLMCore,
    LLMDataLoader,
    LLMHarnessOp,
    LLMRequest,
    LLMResponse,
    LLMServer,
    LLMServerFactory,
    LLMServerProgressDisplay,
    WarmupManager,
)
from mpillm.llmlib import fields as llmlib_fields
from mpillm.options.fields import AllFields
from mpillm.options.mitten import Configuration
from tests.helpers.engine_configs import engine_config
from tests.helpers.support import wait_until

STREAMING = {AllFields.scenarios: ("Server",), AllFields.max_output_len: 8}


class Core(LLMCore):
    """Answers when it is told to; its own ids differ from the requests'."""

    def __init__(
        self, *, healthy_after: int = 0, pieces: Sequence[Sequence[int]] = ((1, 2),), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.waiting: list[int] = []
        self.seen: list[LLMRequest] = []
        self.may_answer = threading.Event()
        self.pieces = pieces
        self.health_checks_left = healthy_after
        self.error_first = False
        self.cleaned_up = 0

    def _enqueue_impl(self, queries: list[LLMRequest]) -> list[int]:
        ids = [1000 + len(self.seen) + i for i in range(len(queries))]
        self.seen += queries
        self.waiting += ids
        return ids

    def _poll_responses_impl(self, timeout: datetime.timedelta) -> Iterator[LLMResponse]:
        if not self.may_answer.wait(timeout.total_seconds()):
            return
        while self.waiting:
            id_ = self.waiting.pop(0)
            if self.error_first:
                self.error_first = False
                self.waiting.append(id_)
                yield LLMResponse(id_, None, None, OSError("once"))
                continue
            for number, piece in enumerate(self.pieces, 1):
                yield LLMResponse(id_, [list(piece), [99]], number == len(self.pieces), None)

    def _cleanup_resources(self) -> None:
        self.cleaned_up += 1

    def run_health_check(self) -> None:
        self.health_checks_left -= 1
        if self.health_checks_left >= 0:
            raise ConnectionError("not yet")

    @classmethod
    def get_num_cores_for_workload(cls, n: int = 2, **kwargs: Any) -> int:
        return n

    @classmethod
    def get_config_for_core(cls, core_index: int, n: int = 2, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"name": f"Core#{core_index}", "harness_config": HarnessConfig(), **kwargs}


Calls = list[tuple[int, list[int], bool]]


@pytest.fixture
def calls() -> Calls:
    return []


def make(calls: Calls, policy: str = "load_balancing", values: Any = None, **kwargs: Any) -> LLMServer:
    with Configuration(
        {AllFields.traffic_distribution_policy: policy, **(values or {})}, options={}
    ).autoapply():
        return LLMServerFactory.create_server(
            Core,
            disable_progress_display=True,
            complete_callback=lambda request_id, output_tokens, is_first_token: calls.append(
                (request_id, output_tokens, is_first_token)
            ),
            **kwargs,
        )


def requests(n: int, first: int = 0) -> list[LLMRequest]:
    return [LLMRequest(first + i, [1, 2, 3]) for i in range(n)]


@pytest.mark.parametrize("policy", ["round_robin", "load_balancing"])
def test_a_server_spreads_a_batch_and_waits_for_it(calls: Calls, policy: str) -> None:
    server = make(calls, policy, n=3)
    cores: list[Any] = list(server.cores)
    server.issue_queries(requests(7))
    assert sorted(core.get_num_pending_samples() for core in cores) == [2, 2, 3]
    server.issue_queries(requests(1, 7))
    assert max(core.get_num_pending_samples() for core in cores) == 3
    for core in cores:
        core.may_answer.set()
    server.flush_queries()
    assert sorted(calls) == [(i, [1, 2], False) for i in range(8)]
    assert (
        server.sample_count == 8
        and server.progress_display.completed == 8
        and server.progress_display.tokens == 16
    )
    server.stop_work()
    assert [core.cleaned_up for core in cores] == [1, 1, 1] and not server.cores
    assert not any(core.response_thread.is_alive() for core in cores)
    with pytest.raises(RuntimeError, match="core Core#0 was stopped"):
        cores[0].enqueue(requests(1))


def test_a_policy_that_needs_ranks_is_refused(calls: Calls) -> None:
    with pytest.raises(ConfigError, match="kv_cache_aware: LLMServer has round_robin, load_balancing"):
        make(calls, "kv_cache_aware", n=2)


def test_streaming(calls: Calls) -> None:
    server = make(calls, values=STREAMING, n=1)
    (core,) = (core for core in server.cores if isinstance(core, Core))
    core.pieces = [[], [4], [5, 6], [7]]
    core.may_answer.set()
    server.issue_queries(requests(1))
    server.stop_work()
    assert calls == [(0, [4], True), (0, [4, 5, 6, 7], False)]
    assert server.progress_display.units["TTFT(s)"][0] == server.progress_display.units["TPOT(ms)"][0] == 1


def test_an_error_is_no_answer(calls: Calls) -> None:
    """The core gives an error row for the request."""
    server = make(calls, n=1)
    (core,) = (core for core in server.cores if isinstance(core, Core))
    core.error_first = True
    core.may_answer.set()
    server.issue_queries(requests(2))
    server.stop_work()
    assert sorted(calls) == [(0, [1, 2], False), (1, [1, 2], False)]


@pytest.mark.parametrize(
    ("pieces", "values", "message"),
    [
        ([[1], [2]], {}, "is not final, and this run is not streaming"),
        (
            [[1]],
            {AllFields.min_output_len: 2, AllFields.max_output_len: 8},
            "an answer of 1 tokens; min_output_len is 2",
        ),
        ([[1, 2], [3]], {"twice": True}, "which is not open"),
    ],
)
def test_wrong_responses(calls: Calls, pieces: Any, values: Any, message: str) -> None:
    twice = values.pop("twice", False) if isinstance(values, dict) else False
    server = make(calls, values=values, n=1)
    (core,) = (core for core in server.cores if isinstance(core, Core))
    core.pieces = pieces if not twice else [[1, 2]]
    server.issue_queries(requests(1))
    if twice:
        core.waiting *= 2
    core.may_answer.set()
    wait_until(lambda: core.error is not None, "the response thread's failure", 20)
    with pytest.raises(RuntimeError, match=f"core Core#0 failed: RuntimeError: .*{message}"):
        server.flush_queries()
    server.abandon()
    assert core.cleaned_up == 1


def test_a_silent_core_fails_after_the_stall_timeout(calls: Calls) -> None:
    server = make(calls, values={AllFields.stall_timeout: 0.1}, n=1)
    server.issue_queries(requests(2))
    with pytest.raises(
        TimeoutError, match=r"core Core#0: 2 requests open, and silent for \d\d? s \(--stall_timeout 0\.1\)"
    ):
        server.flush_queries()  # by default it would be 300 s
    server.abandon()


def test_a_thread_that_does_not_end_is_reported(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    """The server does not wait for a backend that ignores the timeout of a poll."""
    polling, released = threading.Event(), threading.Event()

    def poll(timeout: datetime.timedelta) -> list[LLMResponse]:
        polling.set()
        released.wait(300)
        return []

    server = make(calls, n=1)
    (core,) = server.cores
    polled: Any = core
    polled._poll_responses_impl = poll
    polled._end_s = 0.1
    server.issue_queries(requests(1))
    assert polling.wait(300)
    server.abandon()
    assert "core Core#0: _poll_responses_impl has not returned for 0.1 s; its thread is left" in caplog.text
    released.set()
    assert core.response_thread is not None
    core.response_thread.join(300)
    assert not core.response_thread.is_alive()


def test_a_warm_up_calls_no_callback(calls: Calls) -> None:
    server = make(calls)
    for core in server.cores:
        assert isinstance(core, Core)
        core.health_checks_left = 2
        core.may_answer.set()
    cores: list[Any] = list(server.cores)
    server.warm_up(3)
    assert [len(core.seen) for core in cores] == [3, 3] and calls == []
    assert server.progress_display.completed == 0
    server.issue_queries(requests(2))
    server.stop_work()
    assert len(calls) == 2


def test_a_warm_up_of_its_own(calls: Calls) -> None:
    class Own(Core):
        warmed = 0

        def warm_up(self) -> None:  # type: ignore[override]
            Own.warmed += 1

    cores = make(calls).cores
    for core in cores:
        core.__class__ = Own
    WarmupManager().warmup(cores, requests(4))
    assert Own.warmed == 2 and all(not core.seen for core in cores if isinstance(core, Core))


def test_an_unhealthy_core(calls: Calls) -> None:
    cores = make(calls).cores
    for core in cores:
        assert isinstance(core, Core)
    cores[1].health_checks_left = 1000  # type: ignore[attr-defined]
    with pytest.raises(
        TimeoutError, match=r"core Core#1 is not healthy after 0.3 s: ConnectionError: not yet"
    ):
        WarmupManager(readiness_timeout=0.3).warmup(cores, requests(1))


class NeedsModel(Core):
    needs_model = True


def test_a_registered_class_and_what_it_declares() -> None:
    name = f"{__name__}:NeedsModel"
    core = BackendRegistry.get(name)
    assert core is BackendRegistry.get(name) and core.needs_model and core.__name__ == "NeedsModel"
    with pytest.raises(ConfigError, match=r"gave 2, but this run has 3 instances, which need a core each"):
        core.check(CoreConfig("x", settings=Configuration(), n_instances=3))
    core.check(
        CoreConfig("x", settings=Configuration(), n_instances=3, engine=engine_config(core_options={"n": 3}))
    )
    with pytest.raises(ConfigError, match=r"get_num_cores_for_workload\(\) gave 0; must be at least 1"):
        core.check(CoreConfig("x", settings=Configuration(), engine=engine_config(core_options={"n": 0})))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (((7,), (8, 9)), "2 words, but a request of llmlib has one"),
        (("end",), "'end': a request of llmlib has tokens, not text"),
    ],
)
def test_stop_words_that_a_request_cannot_have(words: tuple[Any, ...], message: str) -> None:
    core = BackendRegistry.get(f"{__name__}:NeedsModel")
    core.check(CoreConfig("x", settings=Configuration(), engine=engine_config(stop_words=((8, 9),))))
    with pytest.raises(ConfigError, match=f"^--stop_words.*{message}"):
        core.check(CoreConfig("x", settings=Configuration(), engine=engine_config(stop_words=words)))


class Lacking(LLMCore):
    def run_health_check(self) -> None: ...


def test_a_class_that_lacks_methods() -> None:
    with pytest.raises(
        ConfigError,
        match="Lacking lacks _enqueue_impl, _poll_responses_impl, get_config_for_core, get_num_cores_for",
    ):
        BackendRegistry.get(f"{__name__}:Lacking")


def test_how_answers_are_generated(tmp_path: Path) -> None:
    """A file says so, or the configuration in force, which in a run has the file in it, or the defaults."""
    file = tmp_path / "generation_config.json"
    file.write_text('{"generation_config": {"max_output_len": 77, "eos_token_id": 5}}')
    generation = HarnessConfig(gen_config_path=str(file)).gen_config
    assert generation is not None and (generation.max_output_len, generation.eos_token_id) == (77, (5,))
    with Configuration({AllFields.llm_gen_config_path: str(file)}, options={}).autoapply():
        generation = HarnessConfig().gen_config
    assert generation is not None and generation.max_output_len == 77 and not generation.streaming, (
        "Offline does not stream"
    )
    with Configuration({**STREAMING, AllFields.llm_gen_config_path: str(file)}, options={}).autoapply():
        generation = HarnessConfig().gen_config
    assert generation is not None and generation.max_output_len == 8 and generation.streaming
    assert HarnessConfig().gen_config is not None


def test_fields_by_name() -> None:
    assert llmlib_fields.trtllm_runtime_flags is AllFields.trtllm_runtime_flags
    with pytest.raises(AttributeError, match="did you mean 'trtllm_runtime_flags'"):
        _ = llmlib_fields.trtllm_runtime_flag


class Loader(LLMDataLoader):
    prompts: Sequence[Sequence[int]] = ((1, 2, 3), (4,))
    stops: Sequence[Sequence[int] | None] = ((7, 8), None)

    def __len__(self) -> int:
        return 2

    def get_input_tokens(self, sample_indices: Sequence[int]) -> Sequence[Sequence[int]]:
        return [self.prompts[i] for i in sample_indices if i < len(self.prompts)]

    def get_stop_tokens(self, sample_indices: Sequence[int]) -> Sequence[Sequence[int] | None]:
        return [self.stops[i] for i in sample_indices]


def test_a_loader(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.eye(3))
    with Configuration({AllFields.dataset_path: str(tmp_path)}, options={}).autoapply():
        loader = Loader(["ids.npy"])
    assert loader.ids.tolist() == np.eye(3).tolist()
    with pytest.raises(
        AttributeError, match=r"Loader has no attribute lens, and has loaded no file lens.npy"
    ):
        _ = loader.lens
    with pytest.raises(ConfigError, match=r"lens.npy cannot be read"):
        Loader(["lens.npy"], dataset_path=tmp_path)
    samples = loader.load()
    assert samples.tokens.tolist() == [1, 2, 3, 4] and samples.lengths.tolist() == [3, 1]
    assert samples.stop_words is not None and samples.stop_words.tolist() == [[7, 8], [-1, -1]]

    class Other(Loader):
        stops = (None, None)

    assert Other().load().stop_words is None
    for prompts, message in (
        (((1,), ()), "sample 1 has no tokens"),
        (((1,),), "get_input_tokens returned 1 samples instead of 2"),
    ):
        Other.prompts = prompts
        with pytest.raises(ConfigError, match=message):
            Other().load()


def test_arguments_that_an_operation_passes_to_a_run(command_line: list[str]) -> None:
    """Arguments of the call override the command line, which overrides the configuration in force."""
    command_line += ["--max_output_len=5", "--seed=3"]

    class Op(LLMHarnessOp):
        data_loader = Loader

    values = {AllFields.max_output_len: 9, AllFields.top_k: 4, AllFields.seed: 7}
    with Configuration(values, options={}).autoapply():
        words = Op(core_type=Core, workload="llama2-70b", seed=1).argv()
    assert words[:2] == ["--max_output_len=5", "--seed=3"]
    path = __name__
    assert sorted(words[2:]) == [
        "--benchmarks=llama2-70b",
        f"--core_type={path}:Core",
        f"--dataset={path}:Loader",
        "--seed=1",
        "--top_k=4",
    ]
    with pytest.raises(ConfigError, match=r"no option max_output_length.*did you mean"):
        Op(max_output_length=3).argv()

    class Issuing(Op):
        def issue_queries(self, samples: object) -> None: ...

    with pytest.raises(ConfigError, match=r"Issuing.issue_queries would not be called"):
        Issuing()


def test_the_display_draws(capsys: pytest.CaptureFixture[str]) -> None:
    display = LLMServerProgressDisplay(total=2)
    display.update(2, {"tokens/s": 12, "TTFT(s)": [0.5, 0.25]})
    assert display.units == {"tokens/s": (1, 12.0), "TTFT(s)": (2, 0.75)}
    display.finish()
    assert "2 of 2 samples, 12 tokens" in capsys.readouterr().out
