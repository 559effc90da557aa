"""Where TensorRT-LLM imports: the record is its interface, and what our cores make of a configuration it
takes."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch
from mpillm.cores.base import CoreConfig, LLMCore
from mpillm.options.options import parse_run
from mpillm.trtllm.executor import TrtllmExecutorCore
from mpillm.trtllm.hlapi import TrtllmHlApiCore
from tests.helpers.engine_configs import engine_config

pytestmark = pytest.mark.trtllm
RECORD = json.loads((Path(__file__).parents[2] / "data/trtllm/record.json").read_text(encoding="utf-8"))


@pytest.fixture
def bindings() -> ModuleType:
    return pytest.importorskip("tensorrt_llm.bindings.executor", exc_type=ImportError)  # type: ignore[no-any-return]


def made(core: type[LLMCore], folder: Path, *options: str) -> Any:
    config = parse_run([f"--engine_dir={folder}", f"--model_path={folder}", *options])
    given = CoreConfig(
        config.core_type,
        engine_config(folder, engine_dir=str(folder), end_ids=(7, 8), enable_chunked_context=True),
        settings=core.settings(config),
    )
    return core(given)


def test_the_record_is_its_interface(bindings: ModuleType) -> None:
    lacking = []
    for name, spec in RECORD["bindings"].items():
        owner = bindings if name != "MpiComm" else pytest.importorskip("tensorrt_llm.bindings")
        there = getattr(owner, name, None)
        wanted = spec.get("members") or [*spec["methods"], *spec["attributes"]]
        lacking += [f"{name}.{part}" for part in wanted if not hasattr(there, part)]
    assert lacking == []


def test_it_takes_what_the_executors_core_makes(bindings: ModuleType, folder: Path) -> None:
    core = made(
        TrtllmExecutorCore,
        folder,
        "--core_type=trtllm_executor",
        "--trtllm_runtime_flags=cuda_graph_mode:true",
    )
    core._tle, core._ends = bindings, (7, 8)
    config = core._executor_config([0])
    assert config.extended_runtime_perf_knob_config.cuda_graph_mode is True
    row = np.zeros(1, REQUEST)
    row["n_tokens"], row["max_output"], row["temperature"], row["top_p"], row["generation"] = (
        3,
        5,
        0.5,
        0.5,
        NO_INSTANCE,
    )
    request = core._request(Batch(row, np.array([1, 2, 3], np.int32)))
    assert (list(request.input_token_ids), request.max_tokens, request.end_id) == ([1, 2, 3], 5, 7)
    assert [list(word) for word in request.stop_words] == [[8]]


def test_it_takes_what_the_llm_apis_core_makes(bindings: ModuleType, folder: Path) -> None:
    import tensorrt_llm
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

    core = made(TrtllmHlApiCore, folder, "--core_type=trtllm_hlapi")
    assert core._arguments().keys() <= {*TorchLlmArgs.model_fields, "backend"}
    fields = {field.name for field in dataclasses.fields(tensorrt_llm.SamplingParams)}
    used = {
        "max_tokens",
        "end_id",
        "pad_id",
        "stop_token_ids",
        "include_stop_str_in_output",
        "detokenize",
        "min_tokens",
        "top_k",
        "seed",
    }
    assert used <= fields
    assert {"inputs", "sampling_params", "streaming"} <= inspect.signature(
        tensorrt_llm.LLM.generate_async
    ).parameters.keys()
