"""A run takes of a disaggregation YAML what its cores can do, reports the rest, and writes what ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import disagg
from disagg.errors import ConfigError
from disagg.schema import TOP_LEVEL
from mpillm.cli import main
from mpillm.commands.plan import main as plan_main
from mpillm.cores.base import CoreConfig
from mpillm.nvidia.configs import TrtllmDisaggEndpointConfig
from mpillm.options.disagg_yaml import disagg_config
from mpillm.options.fields import AllFields
from mpillm.options.fields.effects import RUN, SERVE
from mpillm.options.mitten import configured
from mpillm.options.options import parse_run, parse_serve
from mpillm.options.unused_options import check_unused
from mpillm.roles.prefix_pool import PrefixRouting
from mpillm.runtime.core_configs import check_handoff, core_configs, effective_yaml
from mpillm.runtime.rank_roles import prefix_routing
from mpillm.runtime.yaml_effects import check_leaders_yaml, check_yaml
from tests.helpers.configured import DUMMY
from tests.helpers.disagg_options import TORCH, cores, given, section
from tests.helpers.engine_configs import engine_config


def test_the_run_directorys_yaml_is_what_ran(file: Path) -> None:
    """The file has the command line's values and the defaults, too; a run of that file has the same
    values."""
    config = given(
        file,
        "--max_batch_size",
        "7",
        core=TORCH,
        model="tiny-llama",
        executors={**section(max_num_tokens=55), "moe_config": {}},
    )
    yaml, made = cores(config, 2)
    executors = yaml.executors
    assert executors is not None and yaml.model == "tiny-llama"
    assert (executors.max_batch_size, executors.max_num_tokens, executors.max_seq_len) == (7, 55, None)
    assert executors.kv_cache_config == {
        "free_gpu_memory_fraction": 0.8,
        "tokens_per_block": 32,
        "enable_block_reuse": False,
    }
    assert executors.router == {"type": "load_balancing"}
    assert executors.extra == {
        "moe_config": {},
        "enable_chunked_prefill": False,
        "scheduler_config": {
            "context_chunking_policy": "FIRST_COME_FIRST_SERVED",
            "capacity_scheduler_policy": "MAX_UTILIZATION",
            "dynamic_batch_config": {"enable_max_num_tokens_tuning": False},
        },
        "max_beam_width": 1,
    }
    file.write_text(disagg.dump(yaml))
    again = parse_run([*TORCH, "--disagg_config", str(file)])
    assert cores(again, 2) == (yaml, made)


def test_a_generated_yaml_is_what_ran_and_where() -> None:
    config = parse_run(
        [
            *TORCH,
            "--mode",
            "disaggregated",
            "--max_num_tokens",
            "55",
            "--kv_cache_tokens",
            "640",
            "--dtype",
            "float32",
        ]
    )
    yaml = disagg_config(config, 4)
    plan = disagg.plan(yaml, 4, ["a", "b", "b", "c"])
    made = effective_yaml(
        config,
        yaml,
        plan,
        core_configs(config, plan, [instance.root_rank for instance in plan.instances], {}),
    )
    assert made.hostname == "a"
    assert [url for _, server in made.sections for url in server.urls] == ["b:8001", "b:8002", "c:8003"]
    for _, server in made.sections:
        assert (server.max_num_tokens, server.kv_cache_config["max_tokens"], server.extra["dtype"]) == (
            55,
            640,
            "float32",
        )


def test_flags_that_our_cores_ignore_are_reported(file: Path) -> None:
    kv_cache = {"tokens_per_block": 16, "event_buffer_max_size": 1024, "host_cache_size": None}
    config = given(
        file,
        core=DUMMY,
        context_servers={
            "router": {"type": "remote_http"},
            "kv_cache_config": kv_cache,
            "cuda_graph_config": None,
        },
        generation_servers={
            "cuda_graph_config": {"max_batch_size": 8},
            "disable_overlap_scheduler": True,
            "free_gpu_memory_fraction": 0.5,
        },
    )
    assert check_yaml(config) == [
        "context_servers: mpillm has no router remote_http; it uses load_balancing instead",
        "context_servers: has no effect on the dummy core: kv_cache_config.event_buffer_max_size",
        "generation_servers: has no effect on the dummy core: cuda_graph_config, disable_overlap_scheduler",
    ]
    assert config.in_section("generation_servers").kv_cache_free_gpu_mem_fraction == 0.5
    assert check_yaml(parse_run(DUMMY)) == []


@pytest.mark.parametrize(
    ("core", "is_needed"),
    [(TORCH, True), (DUMMY, False), (["--server", "vllm"], True), (["--server", "tritonserver"], False)],
)
def test_a_model_that_the_run_lacks_is_named(file: Path, core: list[str], is_needed: bool) -> None:
    """In any form of the YAML, and only if --model_path is missing also."""
    recipe = {"resources": {"prefill_workers": 1, "decode_workers": 1}, "backend": {"type": "vllm"}}
    sections: dict[str, Any] = {"context_servers": {}, "generation_servers": {}}
    for content in recipe, sections:
        lines = check_yaml(given(file, core=core, **content))
        assert (f"{file}: no model in it: a run needs --model_path" in lines) == is_needed
        assert not any("no model" in line for line in check_yaml(given(file, *MODEL, core=core, **content)))


MODEL = ("--model_path", "tiny-llama")
ALL_KINDS: dict[str, Any] = {
    "hostname": "a",
    "port": 9000,
    "max_retries": 3,
    "perf_metrics_max_requests": 9,
    "return_perf_metrics": True,
    "perf_metrics_output_dir": "d",
    "conditional_disagg_config": {"max_local_prefill_length": 5},
    "otlp_config": {"otlp_traces_endpoint": "e"},
    "disagg_cluster": {"cluster_uri": "http://a:1"},
    "node_id": 1,
    "schedule_style": "generation_first",
    "allow_request_chat_template": True,
    "gen_strip_message_history": True,
    "gen_tokids_ctxbytes": True,
    "num_workers": 2,
    "disagg_coordinator_url": "http://a:2",
    "bind_host": "a",
    "server_keep_alive_timeout": 9,
    "internal_request_auth_key": "k",
}
USUAL = {
    "hostname": "localhost",
    "port": 8000,
    "max_retries": 1,
    "perf_metrics_max_requests": 0,
    "return_perf_metrics": False,
    "schedule_style": "context_first",
    "allow_request_chat_template": False,
    "gen_strip_message_history": False,
    "gen_tokids_ctxbytes": False,
    "num_workers": 1,
}


def test_every_option_of_the_leader_has_its_effect_or_is_named(file: Path) -> None:
    """A run's leader listens nowhere; the one of servers has its address and the number of retries."""
    sections: dict[str, Any] = {"context_servers": {"urls": ["a:1"]}, "generation_servers": {"urls": ["a:2"]}}
    assert set(ALL_KINDS) == set(TOP_LEVEL)
    names = ", ".join(name for name in ALL_KINDS if name != "perf_metrics_max_requests")
    named = f"{file}: has no effect on mpillm's leader: {names}"
    config = given(file, core=DUMMY, **ALL_KINDS, **sections)
    assert check_yaml(config) == [
        named,
        "context_servers: has no effect on the dummy core: urls",
        "generation_servers: has no effect on the dummy core: urls",
    ]
    (line,) = check_leaders_yaml(config)
    assert line.split(": ")[-1].split(", ") == [*ALL_KINDS][3:]
    config = given(file, core=DUMMY, **USUAL, **sections)
    assert len(check_yaml(config)) == 2
    assert check_leaders_yaml(config) == []


def test_keys_inside_mappings_have_their_effect_or_are_named(file: Path) -> None:
    inside = {
        "cache_transceiver_config": {
            "backend": "NIXL",
            "kv_transfer_timeout_ms": 5,
            "bogus": 1,
        },
        "kv_cache_config": {"bogus": {"a": 1}, "dtype": "fp8"},
        "kv_cache_dtype": "auto",
        "scheduler_config": {"dynamic_batch_config": {"enable_batch_size_tuning": True}},
        "backend": "pytorch",
        "model": "tiny-llama",
    }
    names = (
        "kv_cache_config.bogus, cache_transceiver_config.backend,"
        " cache_transceiver_config.kv_transfer_timeout_ms,"
        " cache_transceiver_config.bogus,"
        " scheduler_config.dynamic_batch_config.enable_batch_size_tuning"
    )
    config = given(file, core=TORCH, executors=inside)
    assert check_yaml(config) == [
        f"{file}: has no effect on mpillm's leader: backend",
        f"executors: has no effect on the torch core: {names}",
    ]
    assert config.in_section("executors").kv_cache_dtype == "fp8"
    again = given(file, core=TORCH, executors=inside | {"kv_cache_dtype": "bfloat16"})
    assert "kv_cache_dtype" in check_yaml(again)[1]


def test_guesses_without_a_model(file: Path) -> None:
    """`plan` checks them before a model is there."""
    wrong = {"decoding_type": "NGram", "max_draft_len": 0}
    with pytest.raises(ConfigError, match="--speculative_config max_draft_len 0: must be a whole number"):
        check_yaml(given(file, core=TORCH, executors=section(speculative_config=wrong)))


@pytest.mark.parametrize("half", ["context", "generation"])
def test_a_half_names_its_own_settings_alone(file: Path, half: str) -> None:
    """It is a server, so it has what is said of servers."""
    file.write_text(
        json.dumps(
            {
                "max_retries": 7,
                "context_servers": {"pp_partition": [1], "perf_metrics_max_requests": 5},
                "generation_servers": {
                    "cuda_graph_config": {},
                    "perf_metrics_max_requests": 6,
                    "cache_transceiver_config": {"kv_transfer_timeout_ms": 77, "backend": "UCX", "new": 1},
                },
            }
        )
    )
    config = parse_serve([*DUMMY, "--server_role", half, "--disagg_config", str(file)])
    ignored = {
        "context": "pp_partition",
        "generation": "cache_transceiver_config.backend, cache_transceiver_config.new, cuda_graph_config",
    }[half]
    assert check_yaml(config) == [f"{half}_servers: has no effect on the dummy core: {ignored}"]
    of = config.in_section(f"{half}_servers")
    assert of.perf_metrics_max_requests == {"context": 5, "generation": 6}[half]
    assert of.kv_transfer_timeout_ms == {"context": 60_000, "generation": 77}[half]


def test_a_whole_server_keeps_as_many_metrics_as_the_yaml_sets(file: Path) -> None:
    file.write_text(json.dumps({"perf_metrics_max_requests": 9, "executors": {}}))
    config = parse_serve([*DUMMY, "--disagg_config", str(file)])
    assert config.perf_metrics_max_requests == 9
    assert check_yaml(config) == check_unused(config, SERVE) == []
    (line,) = check_unused(config, RUN)
    assert line.endswith(f"perf_metrics_max_requests 9 ({file}: perf_metrics_max_requests)")


def test_guesses_for_a_workload_that_may_have_none_are_refused(file: Path) -> None:
    """By a client, too: its servers guess. A core that has no guesses only names them."""
    section = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 4}}
    sections: dict[str, Any] = {"context_servers": section, "generation_servers": section}
    for core in (["--core_type", "trtllm_disagg"], TORCH):
        config = given(file, "--benchmarks", "llama2-70b", core=core, model="m", **sections)
        with pytest.raises(ConfigError, match="MLPerf's rules forbid speculative decoding for llama2-70b"):
            check_yaml(config)
        assert check_yaml(given(file, core=core, model="m", **sections)) == []
    dummy = given(file, "--benchmarks", "llama2-70b", core=DUMMY, **sections)
    assert check_yaml(dummy) == []
    (line,) = check_unused(dummy, RUN)
    assert "no effect on the dummy core: speculative_config" in line


def test_plan_prints_the_same_notes_as_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = check_yaml(
        given(file, core=DUMMY, num_workers=2, context_servers={"stream_interval": 2}, generation_servers={})
    )
    assert len(notes) == 2
    assert main(["plan", *DUMMY, "--disagg_config", str(file)]) == 0
    assert capsys.readouterr().out.endswith("".join(f"  {line}\n" for line in notes))
    assert main(["plan", *DUMMY, "--disagg_config", str(file), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == notes


def test_what_only_trtllms_servers_take_is_read_and_not_run(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generation alone, and servers that register themselves: their client reads where the leader is."""
    for content in (
        {"context_servers": {"num_instances": 0}, "generation_servers": {}},
        {"disagg_cluster": {"cluster_uri": "http://a:1"}},
    ):
        client = given(file, core=["--core_type", "trtllm_disagg"], hostname="far", port=81, **content)
        assert check_yaml(client) == []
        assert configured(TrtllmDisaggEndpointConfig, client).endpoint_urls == ("far:81",)
        assert main(["plan", "--disagg_config", str(file)]) == 2
        assert "a request needs a context instance and a generation" in capsys.readouterr().err


def test_routers_that_are_policies_of_ours_are_taken_and_others_leave_the_choice(file: Path) -> None:
    content: dict[str, Any] = {
        "context_servers": {"router": {"type": "ROUND_ROBIN"}},
        "generation_servers": {"router": {"type": "remote_http"}},
    }
    policies = [given(file, **content).in_section(name).traffic_distribution_policy for name in content]
    assert policies == ["round_robin", AllFields.traffic_distribution_policy.default]
    config = given(file, "--traffic_distribution_policy", "round_robin", **content)
    assert [config.in_section(name).traffic_distribution_policy for name in content] == [
        "round_robin",
        "round_robin",
    ]


def test_the_router_for_cached_prompts_takes_its_arguments_and_names_unused_ones(file: Path) -> None:
    router = {"type": "KV_Cache_Aware", "max_batch_size": 8, "use_tokens": True}
    config = given(
        file,
        core=DUMMY,
        context_servers={"router": router, "kv_cache_config": {"tokens_per_block": 16}},
        generation_servers={},
    )
    assert config.in_section("context_servers").traffic_distribution_policy == "kv_cache_aware"
    assert prefix_routing(config) == PrefixRouting(tokens_per_block=16, max_batch_size=8)
    assert check_yaml(config) == ["context_servers: has no effect on the dummy core: router.use_tokens"]
    sticky = {"type": "conversation", "max_batch_size": 8, "match_threshold": 0.5}
    config = given(file, core=DUMMY, executors={"router": sticky})
    assert config.entry_section.traffic_distribution_policy == "conversation"
    assert prefix_routing(config).max_batch_size == 8
    assert check_yaml(config) == ["executors: has no effect on the dummy core: router.match_threshold"]
    torch = ["--core_type", "torch", "--model_path", "tiny-llama", "--traffic_distribution_policy"]
    (line,) = check_yaml(parse_run([*torch, "kv_cache_aware"]))
    assert "reuse is off (--enable_kv_cache_reuse" in line
    assert check_yaml(parse_run([*torch, "kv_cache_aware", "--enable_kv_cache_reuse"])) == []
    assert check_yaml(parse_run([*torch, "round_robin"])) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"context_parallel_size": 2},
            "executors.context_parallel_size 2: must be 1; mpillm has no context parallelism",
        ),
        (
            {"kv_cache_config": {"dtype": "nvfp4"}},
            "executors.kv_cache_config.dtype nvfp4: the torch core has auto, bfloat16, fp8",
        ),
        (
            {"kv_cache_dtype": "int8"},
            "executors.kv_cache_config.dtype int8: the torch core has auto, bfloat16, fp8",
        ),
        ({"dtype": "float16"}, "executors.dtype float16: the torch core has auto, float32, bfloat16"),
        ({"load_format": "vision_only"}, "executors.load_format vision_only: the torch core has auto, dummy"),
        (
            {"scheduler_config": {"context_chunking_policy": "FORCE_CHUNK"}},
            "context_chunking_policy FORCE_CHUNK: the torch core has FIRST_COME_FIRST_SERVED, EQUAL_PROGRESS",
        ),
        (
            {"quant_config": {"quant_algo": "FP8"}},
            "executors.quant_config: the torch core quantises by the checkpoint or --quantization",
        ),
    ],
)
def test_values_that_would_change_the_measurement_are_refused(
    file: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], message: str
) -> None:
    """`plan` refuses them as well. TensorRT-LLM's servers may have them."""
    with pytest.raises(ConfigError, match=message):
        check_yaml(given(file, core=TORCH, model="tiny-llama", executors=values))
    assert main(["plan", "--disagg_config", str(file)]) == 2
    assert message in capsys.readouterr().err
    sections = {"context_servers": values, "generation_servers": values}
    assert check_yaml(given(file, core=["--core_type", "trtllm_disagg"], model="m", **sections)) == []
    assert (
        check_yaml(
            given(file, core=TORCH, model="tiny-llama", executors={"kv_cache_config": {"dtype": "auto"}})
        )
        == []
    )


@pytest.mark.parametrize(
    "values", [{"kv_cache_config": {"dtype": "fp8"}}, {"kv_cache_dtype": "fp8"}], ids=str
)
def test_a_kv_cache_in_fp8(file: Path, values: dict[str, Any]) -> None:
    config = given(file, core=TORCH, model="tiny-llama", executors=values)
    assert check_yaml(config) == []
    assert config.in_section("executors").kv_cache_dtype == "fp8"


def test_a_kv_cache_is_of_one_type_on_both_sides() -> None:
    class Model:
        def __init__(self, kv_dtype: str) -> None:
            self.kv_dtype = kv_dtype

    both = [
        CoreConfig("torch", engine_config(role="context")),
        CoreConfig("torch", engine_config(role="generation")),
    ]
    check_handoff(both, [Model("float32"), Model("float32")])
    check_handoff(both, [None, None])
    with pytest.raises(
        ConfigError,
        match="context instances have a KV cache in float32 and generation instances have a KV cache"
        " in bfloat16",
    ):
        check_handoff(both, [Model("float32"), Model("bfloat16")])


def test_a_plan_of_a_yaml_needs_no_world_size(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan has as many ranks as run-harness starts for the YAML."""
    file.write_text(
        json.dumps(
            {"context_servers": {"num_instances": 2}, "generation_servers": {"tensor_parallel_size": 2}}
        )
    )
    assert plan_main(["--disagg_config", str(file), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 5
    assert plan_main(["--disagg_config", str(file), "--world_size", "6", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 6
    for more, n in ([], 5), (["--control_ranks", "2"], 6):
        assert main(["run-harness", *DUMMY, "--disagg_config", str(file), "--dry_run", *more]) == 0
        assert f"mpirun -n {n} run" in capsys.readouterr().out
    with pytest.raises(
        ConfigError,
        match=r"--control_ranks 2: with the 4 worker ranks of .* it takes 6 ranks, not 5",
    ):
        plan_main(["--disagg_config", str(file), "--world_size", "5", "--control_ranks", "2"])
    with pytest.raises(
        ConfigError, match="plan needs --world_size N, --nodes HOST:SLOTS,… or --disagg_config FILE"
    ):
        plan_main([])


def test_a_dry_run_needs_no_yaml_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["run-harness", *DUMMY, "--mode=disaggregated", f"--disagg_config={tmp_path}/no.yaml"]
    assert main([*options, "--dry_run"]) == 0
    assert "mpirun -n 3 run" in capsys.readouterr().out
    assert main(options) == 2
    assert f"{tmp_path}/no.yaml: cannot be read" in capsys.readouterr().err
