"""Runtime and build flags: the harness's defaults, the options that are the same, who wins, and what our
cores refuse."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg
from disagg.errors import ConfigError
from mpillm.nvidia.backends import TrtllmHarnessConfig
from mpillm.options.disagg_yaml import disagg_config
from mpillm.options.fields import FIELDS, AllFields
from mpillm.options.layers import Layers
from mpillm.options.mitten import configured
from mpillm.options.options import parse_run
from mpillm.options.run_config import RunConfig
from mpillm.options.sources import OptionValue, Source, default_values
from mpillm.runtime.core_configs import check_flags, core_configs
from tests.helpers.configured import DUMMY

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
    assert config.trtllm_runtime_flags == LISTED == configured(TrtllmHarnessConfig, config).runtime_flags
    assert TrtllmHarnessConfig().runtime_flags == LISTED
    assert (
        config.enable_chunked_context,
        config.kv_cache_free_gpu_mem_fraction,
        config.batch_scheduler_policy,
    ) == (
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


def engine(config: RunConfig) -> SimpleNamespace:
    yaml = disagg_config(config, 2)
    plan = disagg.plan(yaml, 2)
    check_flags(config, plan)
    (made,) = core_configs(config, plan, [1], {})
    return SimpleNamespace(**made.engine.values)


def test_a_core_gets_what_a_person_set_then_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a YAML states is tested in test_disagg_values.py."""
    plain = engine(parse_run(TORCH))
    assert not plain.enable_chunked_context
    assert (plain.kv_cache_free_gpu_mem_fraction, plain.batch_scheduler_policy) == (0.80, "max_util")
    flags = "max_batch_size:6,max_num_tokens:66,enable_chunked_context:true,kvcache_free_gpu_mem_frac:0.6"
    flags += ",batch_scheduler_policy:no_evict"
    flagged = engine(parse_run([*TORCH, "--trtllm_runtime_flags", flags]))
    assert (flagged.max_batch_size, flagged.max_num_tokens, flagged.enable_chunked_context) == (6, 66, True)
    assert (flagged.kv_cache_free_gpu_mem_fraction, flagged.batch_scheduler_policy) == (0.6, "no_evict")
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "max_batch_size:7,max_num_tokens:77")
    options = parse_run([*TORCH, "--trtllm_runtime_flags", flags, "--max_batch_size", "8"])
    both = engine(options)
    assert (both.max_batch_size, both.max_num_tokens) == (8, 77)
    assert options.trtllm_runtime_flags["max_batch_size"] == 8
    assert (
        options.where("max_num_tokens") == "environment variable TRTLLM_RUNTIME_FLAGS: trtllm_runtime_flags"
    )


def test_sizes_that_do_not_fit_the_ranks_name_their_source(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("core_type: dummy\ntensor_parallelism: 3\n")
    for words, sources in {
        "--core_type dummy --mode disaggregated --num_gen_servers 4 --ctx_tp_size 9": [
            "--ctx_tp_size 9",
            "--num_gen_servers 4",
        ],
        "--config_file mine.yaml": ["tensor_parallelism 3 (mine.yaml:2)"],
        "--benchmarks llama2": ["tensor_parallelism 2 (workload llama2-70b)"],
    }.items():
        with pytest.raises(ConfigError) as error:
            disagg_config(parse_run(words.replace("mine.yaml", str(file)).split()), 2)
        assert str(error.value).replace(str(file), "mine.yaml").splitlines()[1:] == sources


def test_gpu_batch_size_is_the_batch_size_of_its_workload() -> None:
    assert parse_run([*DUMMY, "--gpu_batch_size", "9"]).max_batch_size == 9
    assert parse_run([*DUMMY, "--gpu_batch_size", "9", "--max_batch_size", "4"]).max_batch_size == 4
    assert (
        parse_run(
            [*DUMMY, "--gpu_batch_size", "9", "--trtllm_runtime_flags", "max_batch_size:4"]
        ).max_batch_size
        == 4
    )
    assert (
        parse_run([*DUMMY, "--gpu_batch_size", "moe:9", "--benchmarks", "mixtral-8x7b"]).max_batch_size == 9
    )
    assert parse_run([*DUMMY, "--gpu_batch_size", "moe:9"]).max_batch_size is None


@pytest.mark.parametrize("core_type", ["torch", "trtllm_executor"])
def test_a_limit_that_nothing_states_is_the_engines(core_type: str) -> None:
    flags = "--trtllm_build_flags=max_batch_size:6,max_num_tokens:66"
    config = parse_run(["--core_type", core_type, flags, "--max_num_tokens", "65"])
    assert (config.max_batch_size, config.max_num_tokens) == (6, 65)
    assert (config.where("max_batch_size"), config.is_user_set("max_batch_size")) == (
        "command line: trtllm_build_flags",
        False,
    )
    assert (engine(config).max_batch_size, config.trtllm_runtime_flags["max_batch_size"]) == (6, 6)
    with pytest.raises(
        ConfigError, match="trtllm_runtime_flags max_num_tokens is 67, more than the 66 of trtllm_build_flags"
    ):
        engine(parse_run([*TORCH, flags, "--max_num_tokens", "67"]))


def test_no_inflight_batching_is_the_static_policy() -> None:
    config = parse_run([*TORCH, "--trtllm_runtime_flags", "use_inflight_batching:false"])
    assert engine(config).batch_scheduler_policy == "static"
    assert config.where("batch_scheduler_policy") == "command line: use_inflight_batching"
    assert config.trtllm_runtime_flags["batch_scheduler_policy"] == "static"
    assert parse_run(
        [*TORCH, "--trtllm_runtime_flags", "use_inflight_batching:false,batch_scheduler_policy:static"]
    )


def test_flags_may_have_the_names_of_tritons_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "kv_cache_free_gpu_mem_fraction:0.5,triton_max_batch_size:4,gpt_model_type:V1"
    flags += ",exclude_input_in_output:true"
    config = parse_run([*TORCH, "--trtllm_runtime_flags", flags])
    assert (config.kv_cache_free_gpu_mem_fraction, config.max_batch_size, config.batch_scheduler_policy) == (
        0.5,
        4,
        "static",
    )
    assert config.trtllm_runtime_flags["kvcache_free_gpu_mem_frac"] == 0.5
    monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", "max_batch_size:3")  # is laid over the other name, too
    assert parse_run([*TORCH, "--trtllm_runtime_flags", flags]).max_batch_size == 3


@pytest.mark.parametrize("value", ["max_utilization", "MAX_UTILIZATION", "max_util"])
def test_policies_may_have_tensorrt_llms_names(value: str) -> None:
    assert (
        parse_run(
            [*TORCH, "--trtllm_runtime_flags", f"batch_scheduler_policy:{value}"]
        ).batch_scheduler_policy
        == "max_util"
    )
    assert parse_run([*TORCH, "--batch_scheduler_policy", value]).batch_scheduler_policy == "max_util"
    assert (
        parse_run([*TORCH, "--batch_scheduler_policy", "guaranteed_no_evict"]).batch_scheduler_policy
        == "no_evict"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "kvcache_free_gpu_mem_fraction:0.5",
            ["has no effect on the {core} core (did you mean 'kvcache_free_gpu_mem_frac'?)"],
        ),
        (
            "a:1",
            ["trtllm_runtime_flags a 1 has no effect on the {core} core; it has batch_scheduler_policy, "],
        ),
        (
            "enable_batch_size_tuning:true",
            ["enable_batch_size_tuning True has no effect on the {core} core"],
        ),
        ("dynamic_batch_moving_average_window:64", ["has no effect on the {core} core"]),
        (
            "exclude_input_from_output:false",
            ["exclude_input_from_output False: the {core} core answers without the prompt"],
        ),
        ("use_inflight_batching:perhaps", ["use_inflight_batching perhaps: expected true or false"]),
        (
            "batch_scheduler_policy:max_utl",
            [
                "batch_scheduler_policy max_utl: expected one of max_util, no_evict",
                "did you mean 'max_util'?",
            ],
        ),
        ("max_num_tokens:0", ["max_num_tokens 0: expected a whole number of at least 1"]),
        ("max_batch_size:2.5", ["max_batch_size 2.5: expected a whole number of at least 1"]),
        (
            "kvcache_free_gpu_mem_frac:80",
            ["kvcache_free_gpu_mem_frac 80: expected a number above 0 and up to 1"],
        ),
        (
            "batching_strategy:inflight_fusd_batching",
            [
                "batching_strategy inflight_fusd_batching: not one of V1, v1,",
                "did you mean 'inflight_fused_batching'?",
            ],
        ),
        ("max_batch_size:4,triton_max_batch_size:8", ["triton_max_batch_size 8, but max_batch_size 4"]),
        (
            "use_inflight_batching:false,batch_scheduler_policy:no_evict",
            ["excludes batch_scheduler_policy no_evict"],
        ),
    ],
)
@pytest.mark.parametrize("where", ["command line", "environment variable TRTLLM_RUNTIME_FLAGS"])
@pytest.mark.parametrize("argv", [TORCH, DUMMY])
def test_our_cores_refuse(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], where: str, flags: str, words: list[str]
) -> None:
    if where == "command line":
        argv = [*argv, "--trtllm_runtime_flags", flags]
    else:
        monkeypatch.setenv("TRTLLM_RUNTIME_FLAGS", flags)
    with pytest.raises(ConfigError) as error:
        parse_run(argv)
    assert str(error.value).startswith(f"{where}: trtllm_runtime_flags ")
    for word in words:
        assert word.replace("{core}", argv[1]) in str(error.value)


@pytest.mark.parametrize(
    "flags",
    ["enable_batch_size_tuning:false", "dynamic_batch_moving_average_window:128", "max_num_tokens:none"],
)
def test_an_explicit_default_value_is_accepted(flags: str) -> None:
    found = parse_run([*TORCH, "--trtllm_runtime_flags", flags]).trtllm_runtime_flags
    assert {name: value for name, value in found.items() if value is not None} == LISTED


def test_tensorrt_cores_are_passed_what_they_are_given() -> None:
    config = parse_run(
        [
            "--core_type",
            "trtllm_executor",
            "--trtllm_runtime_flags",
            "use_cuda_graphs:true,enable_batch_size_tuning:true",
        ]
    )
    assert config.trtllm_runtime_flags["use_cuda_graphs"] is True
    assert config.trtllm_runtime_flags["enable_batch_size_tuning"] is True


def test_flags_may_say_the_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_run(
        [
            "--core_type",
            "trtllm_executor",
            "--trtllm_build_flags",
            "tensor_parallelism:2,pipeline_parallelism:4",
        ]
    )
    assert (config.tensor_parallelism, config.pipeline_parallelism, config.trtllm_build_flags) == (2, 4, {})
    flags = "num_ctx_servers:2,ctx_tp_size:4,num_gen_servers:3,gen_tp_size:1,max_batch_size:8"
    config = parse_run([*DUMMY, "--mode", "disaggregated", "--trtllm_runtime_flags", flags])
    assert (config.num_ctx_servers, config.ctx_tp_size, config.num_gen_servers, config.gen_tp_size) == (
        2,
        4,
        3,
        1,
    )
    assert config.trtllm_runtime_flags == LISTED | {"max_batch_size": 8}
    with pytest.raises(ConfigError) as error:
        parse_run([*DUMMY, "--trtllm_build_flags", "tensor_parallelism:2", "--tensor_parallelism", "8"])
    assert (
        str(error.value)
        == "command line: trtllm_build_flags tensor_parallelism is 2, but tensor_parallelism is 8"
        " (command line)"
    )
    monkeypatch.setenv("TRTLLM_BUILD_FLAGS", "tensor_parallelism:2")
    assert parse_run([*DUMMY, "--tensor_parallelism", "8"]).tensor_parallelism == 8


HIGHER = [source for source in Source if source is not Source.DEFAULT]


@given(
    option=st.none() | st.sampled_from(HIGHER),
    flag=st.none() | st.sampled_from(HIGHER),
    gpu=st.none() | st.sampled_from(HIGHER),
    by_workload=st.booleans(),
)
def test_the_highest_source_wins(
    option: Source | None, flag: Source | None, gpu: Source | None, by_workload: bool
) -> None:
    """The value of the highest source wins. Of equal sources, the option precedes its flag, and the flag
    precedes gpu_batch_size."""
    layers = Layers({Source.DEFAULT: default_values(FIELDS)})
    test = {"core_type": OptionValue("dummy"), "benchmarks": OptionValue(("llama2-70b",))}
    layers = layers.with_layer(Source.DEFAULT, test)
    if option is not None:
        layers = layers.with_layer(option, {"max_batch_size": OptionValue(1, option, "option")})
    if flag is not None:
        flags = layers.value_of(AllFields.trtllm_runtime_flags)
        flags = flags.with_key("max_batch_size", OptionValue(2, flag, "flag"))
        layers = layers.with_layer(Source.DEFAULT, {"trtllm_runtime_flags": flags})
    if gpu is not None:
        sizes = {"llama2-70b": 3, "mixtral-8x7b": 4} if by_workload else 3
        layers = layers.with_layer(gpu, {"gpu_batch_size": OptionValue(sizes, gpu, "gpu")})
    values = layers.resolved()
    candidates = [(source, -n, n) for source, n in ((option, 1), (flag, 2), (gpu, 3)) if source is not None]
    expected = max(candidates)[2] if candidates else None
    assert values["max_batch_size"].value == expected
    assert values["trtllm_runtime_flags"].value.get("max_batch_size") == expected
    if candidates:
        assert values["max_batch_size"].source == max(candidates)[0]
