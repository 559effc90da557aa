"""The plan of servers that ranks own: which GPUs each gets, where it listens, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

import disagg
from disagg import WorldPlan
from disagg.errors import ConfigError
from mpillm.config import layers
from mpillm.config.run_config import RunConfig
from mpillm.devices import Gpu, as_visible
from mpillm.fields import FIELDS
from mpillm.runtime.own_servers import gpus_of_servers, server_lines, server_plans

EIGHT = tuple(Gpu(f"uuid{index}", "H200", 141 << 30, 140 << 30) for index in range(8))


def config_of(**options: str) -> RunConfig:
    stated = {"server": "vllm", "model_path": "/models/it", **options}
    return RunConfig.resolved(layers.stated(stated, FIELDS, None))


def planned(nodes: list[str], clients_per_server: int = 1) -> WorldPlan:
    n = len(nodes)
    return disagg.plan(disagg.generate("aggregated", n), n, nodes, clients_per_server)


def test_servers_share_the_gpus_of_their_node() -> None:
    plan = planned(["a", "a", "a", "b"])
    config = config_of(tensor_parallelism="4")
    assert gpus_of_servers(config, plan, [EIGHT] * 4) == {1: (0, 1, 2, 3), 2: (4, 5, 6, 7), 3: (0, 1, 2, 3)}
    assert gpus_of_servers(config, plan, [()] * 4) == {}, "CPUs"
    with pytest.raises(ConfigError, match="node a has 8 GPUs for 2 servers of 8 each"):
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


def test_where_servers_listen_and_what_is_said() -> None:
    plan = planned(["a", "a", "b", "b", "b"], 2)
    first, second = server_plans(config_of(max_seq_len="2048"), plan, {1: (0,)})
    assert (first.host, first.reached_at) == ("0.0.0.0", "a"), "a client is on another node"
    assert (second.host, second.reached_at) == ("127.0.0.1", "127.0.0.1")
    lines = server_lines(plan, [first, second])
    assert "server 0 (vllm): rank 1 on a, GPU 0, clients: ranks 1-2" in lines
    assert any("vllm serve /models/it" in line and "--max-model-len 2048" in line for line in lines)


def test_a_value_that_the_server_can_not_take() -> None:
    plan = planned(["a", "a"])
    with pytest.raises(ConfigError, match="--server: quantization int8: a vllm server has only fp8"):
        server_lines(plan, server_plans(config_of(quantization="int8"), plan, {}))
