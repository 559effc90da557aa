"""Runtime and build flags: the harness's defaults, the options that are the same, who wins, and what our cores refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg
from disagg.errors import ConfigError
from mpillm.config import RunConfig, parse_run
from mpillm.configurator import DEFAULT, Found, Level, Origin
from mpillm.factory import core_configs, routing_notes, routing_policy
from mpillm.fields import FIELDS
from mpillm.flags import unify
from mpillm.harness_config import TrtllmHarnessConfig
from mpillm.planning import disagg_config

DUMMY = ["--core_type", "dummy"]
TORCH = ["--core_type", "torch", "--model_path", "tiny-llama"]
# As llmlib-readme.md lists them.
LISTED = {
    "batch_scheduler_policy": "max_util",
    "context_chunking_policy": "first_come_first_served",
    "use_inflight_batching": True,
    "enable_batch_size_tuning": False,
    "enable_max_num_tokens_tuning": False,
    "dynamic_batch_moving_average_window": 128,
    "kvcache_free_gpu_mem_frac": 0.80,
    "enable_chunked_context": False,
    "exclude_input_from_output": True,
}


@pytest.fixture(autouse=True)
def no_flags_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in ("CHECKPOINT", "BUILD", "RUNTIME"):
        monkeypatch.delenv(f"TRTLLM_{stage}_FLAGS", raising=False)


@pytest.mark.parametrize("argv", [DUMMY, TORCH, ["--core_type", "trtllm_executor"]])
def test_the_listed_defaults_hold_for_every_core(argv: list[str]) -> None:
    config = parse_run(argv)
    assert config.trtllm_runtime_flags == LISTED == config.build(TrtllmHarnessConfig).runtime_flags
    assert TrtllmHarnessConfig().runtime_flags == LISTED
    assert (config.enable_chunked_context, config.kv_cache_free_gpu_mem_fraction, config.batch_scheduler_policy) == (
        False,
        0.80,
        "max_util",
    )
    assert set(config.to_json()["trtllm_runtime_flags"]["source"].values()) == {"default"}


@pytest.mark.parametrize("stage", ["checkpoint", "build", "runtime"])
def test_the_environment_is_laid_over_key_by_key(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    monkeypatch.setenv(f"TRTLLM_{stage.upper()}_FLAGS", "b:2,c:true")
    config = parse_run(["--core_type", "trtllm_executor", f"--trtllm_{stage}_flags", "a:1,b:1"])
    flags = getattr(config, f"trtllm_{stage}_flags")
    assert {key: flags[key] for key in "abc"} == {"a": 1, "b": 2, "c": True}
    sources = config.to_json()[f"trtllm_{stage}_flags"]["source"]
    variable = f"environment variable TRTLLM_{stage.upper()}_FLAGS"
    assert [sources[key] for key in "abc"] == ["command line", variable, variable]


def core(config: RunConfig, yaml: str = "executors: {num_instances: 1}") -> Any:
    (made,) = core_configs(config, disagg.plan(disagg.parse(yaml), 2), [1], {})
    return made


IN_FILE = (
    "executors: {num_instances: 1, max_batch_size: 5, max_num_tokens: 55, enable_chunked_prefill: true, "
    "kv_cache_config: {free_gpu_memory_fraction: 0.5}, scheduler_config: {capacity_scheduler_policy: STATIC_BATCH}}"
)


def test_a_core_gets_what_a_person_set_then_the_yaml_then_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = core(parse_run(DUMMY))
    assert (plain.enable_chunked_context, plain.kv_cache_fraction, plain.batch_scheduler_policy) == (False, 0.80, "max_util")
    from_file = core(parse_run(DUMMY), IN_FILE)
    assert (from_file.max_batch_size, from_file.max_num_tokens, from_file.enable_chunked_context) == (5, 55, True)
    assert (from_file.kv_cache_fraction, from_file.batch_scheduler_policy) == (0.5, "static")
    flags = "max_batch_size:6,max_num_tokens:66,enable_chunked_context:false,kvcache_free_gpu_mem_frac:0.6,batch_scheduler_policy:no_evict"
    flagged = core(parse_run([*DUMMY, "--trtllm_runtime_flags", flags]), IN_FILE)
    assert (flagged.max_batch_size, flagged.max_num_tokens, flagged.enable_chunked_context) == (6, 66, False)
    assert (flagged.kv_cache_fraction, flagged.batch_scheduler_policy) == (0.6, "no_evict")
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "max_batch_size:7,max_num_tokens:77")
    options = parse_run([*DUMMY, "--trtllm_runtime_flags", flags, "--max_batch_size", "8"])
    both = core(options, IN_FILE)
    assert (both.max_batch_size, both.max_num_tokens) == (8, 77)
    assert options.trtllm_runtime_flags["max_batch_size"] == 8
    assert options.source("max_num_tokens") == "environment variable TRTLLM_RUNTIME_FLAGS: trtllm_runtime_flags"


def test_options_may_say_what_a_yaml_says_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "disagg.yaml"
    size = "num_instances: 2, tensor_parallel_size: 4, moe_expert_parallel_size: 2"
    file.write_text(f"context_servers: {{{size}}}\ngeneration_servers: {{{size}}}\n")
    argv = [*DUMMY, "--disagg_config", str(file)]
    same = ["--num_ctx_servers", "2", "--gen_tp_size", "4", "--moe_expert_parallelism", "2", "--mode", "disaggregated"]
    assert disagg_config(parse_run([*argv, *same]), 18).n_workers == 16
    for words, message in {
        "--ctx_tp_size 2": f"--ctx_tp_size 2, but context_servers.tensor_parallel_size of {file} is 4",
        "--num_gen_servers 1": f"--num_gen_servers 1, but generation_servers.num_instances of {file} is 2",
        "--moe_expert_parallelism 4": f"--moe_expert_parallelism 4, but context_servers.moe_expert_parallel_size of {file} is 2",
        "--mode aggregated": f"--mode aggregated, but {file} is disaggregated",
    }.items():
        with pytest.raises(ConfigError) as error:
            disagg_config(parse_run([*argv, *words.split()]), 18)
        assert str(error.value) == message


def test_sizes_that_do_not_fit_the_ranks_name_their_source(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("core_type: dummy\ntensor_parallelism: 3\n")
    for words, sources in {
        "--core_type dummy --mode disaggregated --num_gen_servers 4 --ctx_tp_size 9": ["--ctx_tp_size 9", "--num_gen_servers 4"],
        "--config_file mine.yaml": ["tensor_parallelism 3 (mine.yaml:2)"],
        "--benchmarks llama2": ["tensor_parallelism 2 (workload llama2-70b)"],
    }.items():
        with pytest.raises(ConfigError) as error:
            disagg_config(parse_run(words.replace("mine.yaml", str(file)).split()), 2)
        assert str(error.value).replace(str(file), "mine.yaml").splitlines()[1:] == sources


def test_the_routers_of_a_yaml_are_the_policies_unless_a_person_set_one() -> None:
    text = "context_servers: {router: {type: round_robin}}\ngeneration_servers: {router: {type: kv_cache_aware}}\n"
    servers = [server for _, server in disagg.parse(text).sections]
    assert [routing_policy(parse_run(DUMMY), server) for server in servers] == ["round_robin", "load_balancing"]
    assert routing_notes(parse_run(DUMMY), disagg.parse(text)) == [
        "generation_servers: there is no router kv_cache_aware here; requests go by load_balancing"
    ]
    for policy in ("load_balancing", "round_robin"):
        config = parse_run([*DUMMY, "--traffic_distribution_policy", policy])
        assert [routing_policy(config, server) for server in servers] == [policy, policy]


def test_gpu_batch_size_is_the_batch_size_of_its_workload() -> None:
    assert parse_run([*DUMMY, "--gpu_batch_size", "9"]).max_batch_size == 9
    assert parse_run([*DUMMY, "--gpu_batch_size", "9", "--max_batch_size", "4"]).max_batch_size == 4
    assert parse_run([*DUMMY, "--gpu_batch_size", "9", "--trtllm_runtime_flags", "max_batch_size:4"]).max_batch_size == 4
    assert parse_run([*DUMMY, "--gpu_batch_size", "moe:9", "--benchmarks", "mixtral-8x7b"]).max_batch_size == 9
    assert parse_run([*DUMMY, "--gpu_batch_size", "moe:9"]).max_batch_size is None


def test_no_inflight_batching_is_the_static_policy() -> None:
    config = parse_run([*TORCH, "--trtllm_runtime_flags", "use_inflight_batching:false"])
    assert core(config).batch_scheduler_policy == "static"
    assert config.source("batch_scheduler_policy") == "command line: use_inflight_batching"
    assert config.trtllm_runtime_flags["batch_scheduler_policy"] == "static"
    assert parse_run([*TORCH, "--trtllm_runtime_flags", "use_inflight_batching:false,batch_scheduler_policy:static"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("kvcache_free_gpu_mem_fraction:0.5", ["no such flag (did you mean 'kvcache_free_gpu_mem_frac'?)"]),
        ("a:1", ["trtllm_runtime_flags a: the {core} core has no such flag; it has batch_scheduler_policy, "]),
        ("enable_batch_size_tuning:true", ["enable_batch_size_tuning True: has no effect on the {core} core: it is TensorRT-LLM's"]),
        ("enable_max_num_tokens_tuning:true", ["has no effect on the {core} core"]),
        ("dynamic_batch_moving_average_window:64", ["has no effect on the {core} core"]),
        ("exclude_input_from_output:false", ["exclude_input_from_output False: the {core} core answers without the prompt"]),
        ("use_inflight_batching:perhaps", ["use_inflight_batching perhaps: expected true or false"]),
        ("batch_scheduler_policy:max_utl", ["batch_scheduler_policy max_utl: not one of", "did you mean 'max_util'?"]),
        ("max_num_tokens:0", ["max_num_tokens 0: expected a whole number of at least 1"]),
        ("max_batch_size:2.5", ["max_batch_size 2.5: expected a whole number of at least 1"]),
        ("kvcache_free_gpu_mem_frac:80", ["kvcache_free_gpu_mem_frac 80: expected a number above 0 and up to 1"]),
        ("use_inflight_batching:false,batch_scheduler_policy:no_evict", ["excludes batch_scheduler_policy no_evict"]),
    ],
)
@pytest.mark.parametrize("where", ["command line", "environment variable TRTLLM_RUNTIME_FLAGS"])
@pytest.mark.parametrize("argv", [TORCH, DUMMY])
def test_our_cores_refuse(monkeypatch: pytest.MonkeyPatch, argv: list[str], where: str, flags: str, words: list[str]) -> None:
    if where == "command line":
        argv = [*argv, "--trtllm_runtime_flags", flags]
    else:
        monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", flags)
    with pytest.raises(ConfigError) as error:
        parse_run(argv)
    assert str(error.value).startswith(f"{where}: trtllm_runtime_flags ")
    for word in words:
        assert word.replace("{core}", argv[1]) in str(error.value)


@pytest.mark.parametrize("flags", ["enable_batch_size_tuning:false", "dynamic_batch_moving_average_window:128", "max_num_tokens:none"])
def test_a_default_said_aloud_is_no_mistake(flags: str) -> None:
    found = parse_run([*TORCH, "--trtllm_runtime_flags", flags]).trtllm_runtime_flags
    assert {name: value for name, value in found.items() if value is not None} == LISTED


def test_tensorrt_cores_are_passed_what_they_are_given() -> None:
    config = parse_run(["--core_type", "trtllm_executor", "--trtllm_runtime_flags", "use_cuda_graphs:true,enable_batch_size_tuning:true"])
    assert config.trtllm_runtime_flags["use_cuda_graphs"] is True
    assert config.trtllm_runtime_flags["enable_batch_size_tuning"] is True


def test_flags_may_say_the_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_run(["--core_type", "trtllm_executor", "--trtllm_build_flags", "tensor_parallelism:2,pipeline_parallelism:4"])
    assert (config.tensor_parallelism, config.pipeline_parallelism, config.trtllm_build_flags) == (2, 4, {})
    flags = "num_ctx_servers:2,ctx_tp_size:4,num_gen_servers:3,gen_tp_size:1,max_batch_size:8"
    config = parse_run([*DUMMY, "--mode", "disaggregated", "--trtllm_runtime_flags", flags])
    assert (config.num_ctx_servers, config.ctx_tp_size, config.num_gen_servers, config.gen_tp_size) == (2, 4, 3, 1)
    assert config.trtllm_runtime_flags == LISTED | {"max_batch_size": 8}
    with pytest.raises(ConfigError) as error:
        parse_run([*DUMMY, "--trtllm_build_flags", "tensor_parallelism:2", "--tensor_parallelism", "8"])
    assert str(error.value) == "command line: trtllm_build_flags tensor_parallelism is 2, but tensor_parallelism is 8 (command line)"
    monkeypatch.setenv("TRTLLM_BUILD_FLAGS", "tensor_parallelism:2")
    assert parse_run([*DUMMY, "--tensor_parallelism", "8"]).tensor_parallelism == 8


LEVELS = [level for level in Level if level is not Level.DEFAULT]


@given(
    option=st.none() | st.sampled_from(LEVELS),
    flag=st.none() | st.sampled_from(LEVELS),
    gpu=st.none() | st.sampled_from(LEVELS),
    by_workload=st.booleans(),
)
def test_who_wins(option: Level | None, flag: Level | None, gpu: Level | None, by_workload: bool) -> None:
    """The option, its flag and gpu_batch_size, in every combination of sources: the higher source, then the one named first."""
    found = {field.name: Found(field.default, DEFAULT) for field in FIELDS}
    found["core_type"] = Found("dummy", DEFAULT)
    found["benchmarks"] = Found(("llama2-70b",), DEFAULT)
    if option is not None:
        found["max_batch_size"] = Found(1, Origin(option, "option"))
    if flag is not None:
        found["trtllm_runtime_flags"] = Found({"max_batch_size": 2}, Origin(Level.DEFAULT, "x"), {"max_batch_size": Origin(flag, "flag")})
    if gpu is not None:
        found["gpu_batch_size"] = Found({"llama2-70b": 3, "mixtral-8x7b": 4} if by_workload else 3, Origin(gpu, "gpu"))
    unify(found)
    said = [(level, -value, value) for level, value in ((option, 1), (flag, 2), (gpu, 3)) if level is not None]
    expected = max(said)[2] if said else None
    assert found["max_batch_size"].value == expected
    assert found["trtllm_runtime_flags"].value.get("max_batch_size") == expected
    if said:
        assert found["max_batch_size"].origin.level == max(said)[0]
