"""The rules by which one option's value follows from others'."""

from __future__ import annotations

import pytest

from mpillm.options.command_line import Parser
from mpillm.options.fields import FIELDS
from mpillm.options.layers import Layers
from mpillm.options.options import parse
from mpillm.options.rules import RULES, Trace

# Command lines that let each rule change something.
COMMANDS = (
    "--core_type dummy",
    "--core_type dummy --benchmarks llama2-70b-99.9 --gpu_batch_size llama2-70b:5",
    "--core_type dummy --gpu_batch_size 9 --max_batch_size 5 --trtllm_build_flags max_num_tokens:99",
    "--core_type dummy --trtllm_runtime_flags batching_strategy:V1,max_num_tokens:77",
    "--core_type dummy --trtllm_runtime_flags num_ctx_servers:1,num_gen_servers:1 --mode disaggregated",
    "--core_type dummy --trtllm_build_flags tensor_parallelism:2,max_batch_size:9",
    "--model_path tiny-llama --precision fp8",
    "--use_triton --engine_dir e",
    "--core_type trtllm_disagg",
    "--server vllm",
    "--url a:1",
    "--min_duration 30000",
)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[Layers]:
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "enable_chunked_context:true")
    return [parse(line.split(), Parser(prog="mpillm x"), FIELDS).layers for line in COMMANDS]


def test_each_rule_changes_something(layers: list[Layers]) -> None:
    trace: Trace = []
    for one in layers:
        one.resolved(trace)
    assert {rule.name for rule, _, _ in trace} == {rule.name for rule in RULES}


def test_the_trace_has_the_changes_of_a_value(layers: list[Layers]) -> None:
    trace: Trace = []
    value = layers[1].resolved(trace)["max_batch_size"]
    (rule,) = [rule.name for rule, name, _ in trace if name == "max_batch_size"]
    assert rule.startswith("gpu_batch_size sets max_batch_size")
    assert (value.value, value.where) == (5, "command line: gpu_batch_size")
    layers[0].resolved(trace := [])
    assert "model_path" not in {name for _, name, _ in trace}
