"""The plan of servers that ranks own: which GPUs each gets, where it listens, and what is said of it."""

from __future__ import annotations

import json
import pickle
import shlex
from pathlib import Path
from typing import Any

import pytest

import disagg
from disagg import WorldPlan
from disagg.errors import ConfigError
from mpillm.cores.number_of_ranks import ranks_of
from mpillm.devices import Gpu, as_visible
from mpillm.options.disagg_yaml import context_servers, disagg_config, server_ranks
from mpillm.options.fields import FIELDS
from mpillm.options.fields.effects import RUN
from mpillm.options.layers import layers_of
from mpillm.options.option_conflicts import check_conflicts
from mpillm.options.run_config import RunConfig
from mpillm.options.unused_options import check_unused
from mpillm.programs.servers.kind import ServerKind
from mpillm.runtime.own_servers import gpus_of_servers, server_lines, server_specs
from mpillm.runtime.yaml_effects import check_yaml

EIGHT = tuple(Gpu(f"uuid{index}", "H200", 141 << 30, 140 << 30) for index in range(8))


@pytest.fixture(autouse=True)
def no_server_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines depend on the installed release: see programs/test_server_options.py."""
    monkeypatch.setattr(ServerKind, "release", lambda kind: None)


def config_of(**options: str) -> RunConfig:
    values = {"server": "vllm", "model_path": "/models/it", **options}
    return RunConfig(layers_of(values, FIELDS))


def planned(nodes: list[str], clients_per_server: int = 1) -> WorldPlan:
    n = len(nodes)
    return disagg.plan(disagg.generate("aggregated", n), n, nodes, clients_per_server)


def test_servers_share_the_gpus_of_their_node() -> None:
    plan = planned(["a", "a", "a", "b"])
    config = config_of(tensor_parallelism="4")
    assert gpus_of_servers(config, plan, [EIGHT] * 4) == {1: (0, 1, 2, 3), 2: (4, 5, 6, 7), 3: (0, 1, 2, 3)}
    assert gpus_of_servers(config, plan, [()] * 4) == {}, "CPUs"
    with pytest.raises(
        ConfigError, match=r"node a has 8 GPUs, and its 2 servers need 16: .* lower --tensor_parallelism"
    ):
        gpus_of_servers(config_of(tensor_parallelism="8"), plan, [EIGHT] * 4)


def test_gpus_that_the_launcher_gave_each_rank() -> None:
    """Slurm's --gpus-per-task: each rank sees its own, which it counts from 0."""
    plan = planned(["a"] * 3)
    seen = [(), EIGHT[:2], EIGHT[2:4]]
    assert gpus_of_servers(config_of(tensor_parallelism="2"), plan, seen) == {1: (0, 1), 2: (0, 1)}


@pytest.mark.parametrize(("variable", "words"), [(None, ("1", "2")), ("3,5, 7", ("5", "7"))])
def test_devices_for_a_process_below(
    variable: str | None, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert as_visible((1, 2)) == words


def test_addresses_and_plan_lines_of_servers() -> None:
    plan = planned(["a", "a", "b", "b", "b"], 2)
    first, second = server_specs(config_of(max_seq_len="2048"), plan, {1: (0,)})
    assert (first.host, first.reached_at) == ("0.0.0.0", "a"), "a client is on another node"
    assert (second.host, second.reached_at) == ("127.0.0.1", "127.0.0.1")
    lines = server_lines(plan, [first, second])
    assert "server 0 (vllm): rank 1 on a, GPU 0, clients: ranks 1-2" in lines
    command, *_ = lines
    assert max(map(len, command.splitlines())) <= 78, "80 columns, below the table"
    words = shlex.split(command.replace("\\\n", ""))  # as a shell reads it
    assert words[3:6] == ["vllm", "serve", "/models/it"]
    assert words[-3:] == ["--max-model-len", "2048", "--no-enable-prefix-caching"]


def test_a_server_over_two_nodes() -> None:
    config = config_of(tensor_parallelism="16", server_nodes="2")
    check_conflicts(config)
    check_unused(config, RUN)
    assert config.clients_of_a_server == 2 and ranks_of(config) == 3
    plan = disagg.plan(disagg.generate("aggregated", 3), 3, ["a", "a", "b"], 2, nodes_per_server=2)
    gpus = gpus_of_servers(config, plan, [EIGHT] * 3)
    assert gpus == {1: tuple(range(8)), 2: tuple(range(8))}
    first, second = server_specs(config, plan, gpus, {1: 4711, 2: 4712})
    assert (first.rank, first.base.name, first.reached_at) == (1, "server_0", "a")
    assert (second.rank, second.base.name, second.reached_at) == (2, "server_0_1", "b")
    lines = [" ".join(line.replace("\\\n", "").split()) for line in server_lines(plan, [first, second])]
    meeting = "--master-addr a --master-port 4711"
    assert any(line.startswith("servers, part 1 of 2: ") and line.endswith(meeting) for line in lines)
    assert any(f"--node-rank 1 {meeting} --headless" in line for line in lines)
    assert "server 0 (vllm, part 1 of 2): rank 1 on a, GPUs 0-7, clients: ranks 1-2" in lines
    assert "server 0 (vllm, part 2 of 2): rank 2 on b, GPUs 0-7" in lines
    with pytest.raises(ConfigError, match=r"node a has 8 GPUs, .* or raise --server_nodes to 2"):
        gpus_of_servers(config_of(tensor_parallelism="16"), planned(["a", "a", "b"]), [EIGHT] * 3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"clients_per_server": "1"}, "--clients_per_server 1 is fewer than that"),
        ({"tensor_parallelism": "3"}, "a server of 3 devices can't be split into 2 equal parts"),
        ({"mode": "disaggregated"}, "with --mode disaggregated each server is on one node"),
        ({"on_instance_loss": "restart"}, "a server over several nodes is not started again"),
    ],
)
def test_servers_that_can_not_go_over_two_nodes(options: dict[str, str], why: str) -> None:
    values = {"server": "vllm", "server_nodes": "2", "tensor_parallelism": "2", **options}
    if "mode" in options:
        del values["tensor_parallelism"]
    config = RunConfig(layers_of(values, FIELDS))
    with pytest.raises(ConfigError, match=why):
        check_conflicts(config)


def test_a_value_that_the_server_can_not_take() -> None:
    plan = planned(["a", "a"])
    with pytest.raises(ConfigError, match="--server: quantization int8: a vllm server has only fp8"):
        server_lines(plan, server_specs(config_of(quantization="int8"), plan, {}))


def disaggregated(config: RunConfig, nodes: list[str]) -> WorldPlan:
    n = len(nodes)
    made = disagg_config(config, n, clients=True)
    return disagg.plan(made, n, nodes, config.clients_of_a_server, context_servers(config, n))


def test_context_servers_come_first() -> None:
    options = {
        "mode": "disaggregated",
        "num_ctx_servers": "2",
        "clients_per_server": "2",
        "control_ranks": "2",
    }
    config = config_of(**options, ctx_tp_size="2", gen_tp_size="4", max_seq_len="2048")
    plan = disaggregated(config, ["a"] * 6 + ["b"] * 2)
    assert plan.mode == "disaggregated" and pickle.loads(pickle.dumps(plan)) == plan
    assert [rank.roles for rank in plan.ranks] == [
        *[("harness",), ("leader",), ("server", "ctx"), ("server", "ctx")],
        *[("server", "executor"), ("executor",)] * 2,
    ]
    assert [rank.server for rank in plan.ranks] == [None, None, 0, 1, 2, 2, 3, 3]
    assert [(one.owner, one.clients, one.place, one.role) for one in plan.servers] == [
        (2, (4, 5, 6, 7), 0, "context"),
        (3, (4, 5, 6, 7), 1, "context"),
        (4, (4, 5), 2, "generation"),
        (6, (6, 7), 0, "generation"),
    ]
    gpus = gpus_of_servers(config, plan, [EIGHT] * 8)
    assert gpus == {2: (0, 1), 3: (2, 3), 4: (4, 5, 6, 7), 6: (0, 1, 2, 3)}
    check_unused(config, RUN)
    assert ranks_of(config) == 2 + 2 + 2, "one generation server, as nothing says how many"
    plans = server_specs(config, plan, gpus)
    assert [(one.host, one.reached_at) for one in plans] == [
        *[("0.0.0.0", "a")] * 2,
        *[("127.0.0.1", "127.0.0.1")] * 2,
    ]
    lines = server_lines(plan, plans)
    (context,) = {line for line in lines if line.startswith("context servers: ") and "DEVICES=0,1" in line}
    for part in (
        "--tensor-parallel-size 2",
        "kv_producer",
        "VLLM_NIXL_SIDE_CHANNEL_HOST=a",
        "--max-model-len 2048",
    ):
        assert part in context
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=SIDE_CHANNEL_PORT" in context and "--port PORT" in context
    assert any("--tensor-parallel-size 4" in line and "kv_consumer" in line for line in lines)
    assert "server 1 (vllm, context): rank 3 on a, GPUs 2-3, clients: ranks 4-7" in lines
    assert "server 3 (vllm, generation): rank 6 on b, GPUs 0-3, clients: ranks 6-7" in lines
    with pytest.raises(ConfigError, match=r"8 GPUs, and its 3 servers need 20: .* lower --gen_tp_size"):
        gpus_of_servers(config_of(**options, ctx_tp_size="2", gen_tp_size="16"), plan, [EIGHT] * 8)


@pytest.mark.parametrize(
    ("sizes", "model", "why"),
    [
        ((1, 2, 1), {"num_key_value_heads": 2}, ""),
        ((4, 8, 1), {"num_key_value_heads": 2}, ""),
        ((2, 1, 1), {"num_key_value_heads": 2}, ""),
        ((4, 1, 1), {"num_key_value_heads": 2}, "2 KV heads; lower --ctx_tp_size to 2"),
        ((4, 1, 1), {"text_config": {"num_attention_heads": 2}}, "2 KV heads; lower --ctx_tp_size to 2"),
        ((4, 1, 1), {"num_key_value_heads": 2, "kv_lora_rank": 512}, ""),
        ((4, 1, 1), None, ""),
        ((3, 2, 1), None, "--ctx_tp_size 3 and --gen_tp_size 2 must be a multiple"),
        ((1, 1, 2), None, "--gen_pp_size must be 1"),
    ],
)
def test_layouts_between_which_vllm_transfers_no_kv_cache(
    sizes: tuple[int, int, int], model: dict[str, Any] | None, why: str, tmp_path: Path
) -> None:
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps(model))
    options = dict(zip(("ctx_tp_size", "gen_tp_size", "gen_pp_size"), map(str, sizes), strict=True))
    config = config_of(mode="disaggregated", model_path=str(tmp_path), **options)
    plan = disaggregated(config, ["a"] * 3)
    warnings = [line for line in server_lines(plan, server_specs(config, plan, {})) if "warning" in line]
    assert [why in line for line in warnings] == [True] * bool(why)
    config = config_of(
        mode="disaggregated", **options, server_args='--kv-transfer-config \'{"kv_connector": "Lmcache"}\''
    )
    lines = server_lines(plan, server_specs(config, plan, {}))
    assert not any("warning" in line for line in lines), "another connector"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ctx_tp_size": "2", "gen_tp_size": "8"}, ""),
        ({"ctx_pp_size": "2", "gen_pp_size": "2"}, ""),
        ({"ctx_pp_size": "2"}, ""),
        ({"gen_pp_size": "2"}, "SGLang (0.5.23): --gen_pp_size must be 1, or --ctx_pp_size 1"),
        ({"ctx_tp_size": "3", "gen_tp_size": "2"}, "--ctx_tp_size 3 and --gen_tp_size 2 must be a multiple"),
        ({"ctx_tp_size": "3", "gen_tp_size": "2", "server_args": "--attn-dp-size 2"}, ""),
    ],
)
def test_sglang_s_context_and_generation_servers(options: dict[str, str], why: str) -> None:
    config = config_of(server="sglang", mode="disaggregated", model_path="m", **options)
    plan = disaggregated(config, ["a"] * 4)
    lines = [line.replace(" \\\n    ", " ") for line in server_lines(plan, server_specs(config, plan, {}))]
    assert [why in line for line in lines if "warning" in line] == [True] * bool(why)
    (context,) = [line for line in lines if line.startswith("context servers: ")]
    assert "--disaggregation-mode prefill --disaggregation-bootstrap-port BOOTSTRAP_PORT" in context
    (generation,) = [line for line in lines if line.startswith("generation servers: ")]
    assert "--disaggregation-mode decode" in generation and "bootstrap" not in generation
    assert all(
        "--enable-metrics" in line and "--disable-radix-cache" in line for line in (context, generation)
    )


def test_caches_of_sglang_s_context_and_generation_servers(tmp_path: Path) -> None:
    (path := tmp_path / "d.yaml").write_text(
        "context_servers: {num_instances: 1, kv_cache_config: {dtype: fp8}}\n"
        "generation_servers: {num_instances: 1}\n"
    )
    config = config_of(
        server="sglang", disagg_config=str(path), model_path="m", enable_kv_cache_reuse="true"
    ).with_yaml()
    plan = disaggregated(config, ["a"] * 3)
    lines = server_lines(plan, server_specs(config, plan, {}))
    assert any("--kv_cache_dtype is fp8 for context, auto for generation servers" in line for line in lines)
    assert any("--server_args=--disaggregation-decode-enable-radix-cache switches" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("tritonserver", "mpillm starts no context and generation servers of it"),
        ("command:srv {port}", "--server command with --mode disaggregated: mpillm starts no context and"),
    ],
)
def test_kinds_without_halves(kind: str, why: str) -> None:
    config = config_of(server=kind, mode="disaggregated")
    with pytest.raises(ConfigError, match=why):
        server_specs(config, disaggregated(config, ["a"] * 3), {})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"clients_per_server": "2"}, "with --clients_per_server 2 other ranks would not detect the restart"),
        ({"harness": "aiperf"}, "the client of --harness aiperf may use a server itself"),
        ({"server": "tritonserver"}, "a tritonserver server is not started again"),
        ({"server": ""}, "the run starts no servers"),
    ],
)
def test_servers_that_are_not_started_again(options: dict[str, str], why: str) -> None:
    values = {"server": "vllm", "on_instance_loss": "restart", **options}
    values = {name: value for name, value in values.items() if value}
    config = RunConfig(layers_of(values, FIELDS))
    with pytest.raises(ConfigError, match=f"--on_instance_loss restart.*: {why}"):
        check_conflicts(config)


YAML = """
port: 8100
context_servers:
  num_instances: 1
  max_batch_size: 4
  cache_transceiver_config: {backend: UCX}
  attn_backend: TRTLLM
  urls: ["localhost:8101"]
generation_servers:
  num_instances: 2
  tensor_parallel_size: 2
  max_batch_size: 64
  urls: ["localhost:8102", "localhost:8103"]
"""


@pytest.mark.parametrize("kind", ["vllm", "trtllm-serve"])
def test_servers_of_a_yaml(kind: str, tmp_path: Path) -> None:
    (path := tmp_path / "disagg.yaml").write_text(YAML)
    config = config_of(server=kind, disagg_config=str(path)).with_yaml()
    assert server_ranks(config) == 3 and ranks_of(config) == 4
    plan = disaggregated(config, ["a"] * 4)
    context, first, second = server_specs(config, plan, {})
    assert (context.role, first.role, second.role) == ("context", "generation", "generation")
    assert context.values["max_batch_size"] == 4 and second.values["max_batch_size"] == 64
    assert "tensor_parallelism" not in context.values and second.values["tensor_parallelism"] == 2
    assert check_unused(config, RUN) == []
    notes = check_yaml(config)
    assert f"{path}: has no effect on mpillm's leader: port" in notes
    theirs = "urls" if kind == "trtllm-serve" else "cache_transceiver_config.backend, urls, attn_backend"
    assert f"context_servers: has no effect on a {kind} server that the run starts: {theirs}" in notes
    if kind == "trtllm-serve":
        text = context.kind.file_text(context)
        assert (
            "backend: UCX" in text and "attn_backend: TRTLLM" in text and "disable_overlap_scheduler" in text
        )
        text = second.kind.file_text(second)
        assert "backend: DEFAULT" in text and "disable_overlap_scheduler" not in text


def test_service_discovery_of_servers_that_the_run_starts(tmp_path: Path) -> None:
    """They get no cluster's address: mpillm's leader has their ports from the ranks that start them."""
    (path := tmp_path / "disagg.yaml").write_text("disagg_cluster: {cluster_uri: 'http://a:1'}\n" + YAML)
    config = config_of(server="trtllm-serve", disagg_config=str(path)).with_yaml()
    assert f"{path}: disagg_cluster: servers that the run starts need not register" in check_yaml(config)
    (context, *_) = server_specs(config, disaggregated(config, ["a"] * 4), {})
    assert "disagg_cluster" not in context.kind.file_text(context)


def test_the_core_of_a_leader_means_halves() -> None:
    """The reference harness's command line: no leader is started, the clients do what it would."""
    config = config_of(server="trtllm-serve", core_type="trtllm_disagg")
    assert (config.core_type, config.mode) == ("trtllm_endpoint", "disaggregated")
    with pytest.raises(ConfigError, match=r"core_type trtllm_disagg .* means mode disaggregated, but"):
        config_of(server="trtllm-serve", core_type="trtllm_disagg", mode="aggregated")
    with pytest.raises(ConfigError, match=r"server command:.* means core_type trtllm_endpoint, but"):
        config_of(server="command:srv {port}", core_type="trtllm_disagg")
