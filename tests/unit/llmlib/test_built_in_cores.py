"""mpillm's own cores under `LLMServer`, in one process; operations and modules by NVIDIA's names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.comms.messages import RESPONSE, Batch, ResponseFlag
from mpillm.cores import base as ranks
from mpillm.cores.base import short_requests
from mpillm.cores.dummy import answer_tokens
from mpillm.cores.registry import BackendRegistry
from mpillm.llmlib import (
    HarnessConfig,
    LLMCore,
    LLMRequest,
    LLMServerFactory,
    LLMServerProgressDisplay,
    harness_op,
    launch_server,
)
from mpillm.llmlib.cores.built_in import BuiltInCore, built_in, core_of_ranks
from mpillm.llmlib.cores.dummy import DummyCore
from mpillm.options.fields import AllFields
from mpillm.options.mitten import Configuration

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14], [2, 3]]


def answers(
    backend: str | type[LLMCore], values: Mapping[Any, Any], prompts: Sequence[Sequence[int]], **more: Any
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the first tokens that were told, and the answers, by the requests' numbers."""
    firsts: dict[int, list[int]] = {}
    whole: dict[int, list[int]] = {}

    def complete(request_id: int, output_tokens: list[int], is_first_token: bool) -> None:
        (firsts if is_first_token else whole)[request_id] = output_tokens

    with Configuration(values).autoapply():
        server = LLMServerFactory.create_server(
            backend, disable_progress_display=True, complete_callback=complete, **more
        )
        try:
            server.warm_up(2)
            server.issue_queries([LLMRequest(100 + i, [*prompt]) for i, prompt in enumerate(prompts)])
        finally:
            server.stop_work()
    return firsts, whole


def expected(prompts: Sequence[Sequence[int]], n: int) -> dict[int, list[int]]:
    """Return what the dummy core answers."""
    tokens = answer_tokens(short_requests(0), np.zeros(0, np.int64))
    for prompt in prompts:
        request = short_requests(1, len(prompt))
        request.tokens[:] = prompt
        tokens = np.concatenate([tokens, answer_tokens(request, np.array([n]))])
    return {100 + i: answer.tolist() for i, answer in enumerate(tokens.reshape(-1, n))}


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_the_dummy_core_answers_under_a_server(scenario: str) -> None:
    values = {AllFields.scenarios: (scenario,), AllFields.max_output_len: 3}
    if scenario == "Server":
        values[AllFields.server_target_qps] = 10.0
    firsts, whole = answers("dummy", values, PROMPTS, core_options="tpot_ms:2")
    assert whole == expected(PROMPTS, 3)
    first_tokens = {id_: answer[:1] for id_, answer in whole.items()}
    assert firsts == (first_tokens if scenario == "Server" else {})


def test_more_requests_than_the_core_can_hold() -> None:
    prompts = [[i % 50 + 1] * 2 for i in range(40)]
    values = {AllFields.max_output_len: 2, AllFields.max_batch_size: 3}
    _, whole = answers(DummyCore, values, prompts)
    assert whole == expected(prompts, 2)


@pytest.mark.long
def test_the_engine_answers() -> None:
    values = {AllFields.model_path: "tiny-llama", AllFields.max_output_len: 6, AllFields.num_threads: 1}
    _, one = answers("torch", values, PROMPTS[:1])
    _, all_of_them = answers("torch", values, PROMPTS)
    assert all(1 <= len(answer) <= 6 for answer in all_of_them.values()) and len(all_of_them) == len(PROMPTS)
    assert all_of_them[100] == one[100], "batching changes no greedy answer"


class Failing(ranks.LLMCore):
    """Answers each request with an error."""

    def load(self) -> None:
        self.ids: list[int] = []

    def run_health_check(self) -> None: ...

    def credits(self) -> ranks.Credits:
        return ranks.Credits(64, 1 << 20)

    def enqueue(self, requests: Batch) -> None:
        self.ids += requests.rows["id"].tolist()

    def has_work(self) -> bool:
        return bool(self.ids)

    def poll_responses(self) -> Batch:
        flags = int(ResponseFlag.FINAL | ResponseFlag.ERROR)
        rows, self.ids = [(id_, 0, flags) for id_ in self.ids], []
        return Batch(np.array(rows, RESPONSE), np.zeros(0, np.int32))


def test_a_failed_request_is_not_a_short_answer() -> None:
    with Configuration({AllFields.max_output_len: 2}, options={}).autoapply():
        core = BuiltInCore(
            Failing(ranks.CoreConfig("failing")),
            seed=0,
            name="failing-0",
            complete_callback=lambda **_: None,
            harness_config=HarnessConfig(),
            progress_display=LLMServerProgressDisplay(total=1),
        )
    core.enqueue([LLMRequest(7, [1, 2])])
    with pytest.raises(RuntimeError, match=r"core failing-0 failed: RuntimeError: request 7 has failed"):
        core.flush()
    core.end(abandon=True)


def test_options_that_need_ranks_are_refused() -> None:
    values = {AllFields.tensor_parallelism: 2, AllFields.max_output_len: 2}
    with pytest.raises(ConfigError, match=r"tensor_parallelism 2.*one process; use LLMHarnessOp"):
        answers("dummy", values, PROMPTS)


MODULES = {
    "dummy": "dummy",
    "trtllm_executor_core": "trtllm_executor",
    "trtllm_hlapi_core": "trtllm_hlapi",
    "trtllm_endpoint_core": "trtllm_endpoint",
    "triton_grpc_core": "triton_grpc",
}


@pytest.mark.parametrize(("module", "name"), MODULES.items())
def test_a_module_for_each_core(module: str, name: str) -> None:
    found = vars(importlib.import_module(f"mpillm.llmlib.cores.{module}")).values()
    (core,) = (
        one
        for one in found
        if isinstance(one, type) and issubclass(one, BuiltInCore) and one is not BuiltInCore
    )
    assert core.core_type == name
    assert (
        core_of_ranks(core)
        is BackendRegistry.get(name)
        is BackendRegistry.get(f"{core.__module__}:{core.__name__}")
    )
    assert built_in(name).core_type == name


@pytest.mark.parametrize(
    ("op", "core_type"),
    [
        ("DummyHarnessOp", "dummy"),
        ("TrtllmExecutorClientHarnessOp", "trtllm_executor"),
        ("TrtllmHLApiClientHarnessOp", "trtllm_hlapi"),
        ("TrtllmServeClientHarnessOp", "trtllm_endpoint"),
        ("TritonClientHarnessOp", "triton_grpc"),
    ],
)
def test_variants_of_the_harness_name_their_core(op: str, core_type: str) -> None:
    kind = getattr(harness_op, op)
    assert kind(max_output_len=4).argv() == ["--max_output_len=4", f"--core_type={core_type}"]
    assert kind(core_type="torch").argv() == ["--core_type=torch"]


def test_an_operation_runs_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    values = {AllFields.model_path: str(model), AllFields.ctx_tp_size: 1}
    with Configuration(values).autoapply():
        made = launch_server.GenerateTrtllmDisaggConfigOp(disagg_config="disagg.yaml", num_gen_servers=2)
        assert made.run() == {}
    text = (tmp_path / "disagg.yaml").read_text()
    assert str(model) in text and "num_instances: 2" in text


def test_a_failed_operation_names_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no build/triton_model_repo_0"):
        launch_server.RunTritonServerOp().run()
    with pytest.raises(ConfigError, match="there is no option tensor_paralelism"):
        launch_server.RunTrtllmServeOp(tensor_paralelism=2).run()
