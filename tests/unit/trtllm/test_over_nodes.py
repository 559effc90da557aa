"""The command line of `trtllm-serve` over several nodes, and the meaning of its mpirun's output.

A real mpirun, with fakes of TensorRT-LLM's programs: tests/e2e/test_trtllm_serve_over_hosts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import disagg
from disagg.errors import ConfigError
from launch.command import Command
from mpillm.options.fields import FIELDS
from mpillm.options.layers import layers_of
from mpillm.options.run_config import RunConfig
from mpillm.programs.servers.kind import NodesLauncher, ServerNode, ServerSpec
from mpillm.programs.servers.kinds import kind_of
from mpillm.runtime.own_servers import server_lines, server_specs
from mpillm.trtllm.over_nodes import OVER_NODES

KIND = kind_of("trtllm-serve")
SIZES = {"tensor_parallelism": 8, "pipeline_parallelism": 2}


def spec(**fields: Any) -> ServerSpec:
    node = ServerNode(0, 2, "a", 4711, ("a", "b"))
    return ServerSpec(KIND, "/models/m", SIZES, **{"node": node, **fields})


def line_of(one: ServerSpec) -> list[str]:
    server = one.command()
    return list(OVER_NODES.command(one, server, server.argv).argv)


def test_one_mpirun_starts_the_ranks_of_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NCCL_DEBUG", "INFO"), ("HOSTNAME", "a"), ("SLURM_PROCID", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    line = line_of(spec(devices=tuple(range(8))))
    assert line[:3] == ["mpirun", "-n", "16"] and "--oversubscribe" not in line
    assert line[line.index("-H") + 1] == "a:8,b:8", "rank 0, which has the server, is on the first host"
    exported = {line[at + 1] for at, arg in enumerate(line) if arg == "-x"}
    assert {"PATH", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"} <= exported and "HOSTNAME" not in exported
    at = line.index("trtllm-llmapi-launch")
    assert line[at - 5 : at] == ["env", "-u", "SLURM_PROCID", "-u", "SLURM_NTASKS"]
    assert line[at + 1 : at + 3] == ["trtllm-serve", "serve"] and "--pp_size" in line[at:]


def test_the_script_keeps_blanks_and_ends_rank_0() -> None:
    text = OVER_NODES.script(Command(("trtllm-serve", "serve", "/a b/m")))
    assert text.splitlines()[1] == "trtllm-serve serve '/a b/m'" and 'kill -TERM "$(sed' in text


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"args": ("--tp_size=16",)}, "--tp_size=16: use --tensor_parallelism and --pipeline_parallelism"),
        ({"folder": Path("/my runs")}, r"cannot start /my runs/server_0: use another --log_dir"),
    ],
)
def test_servers_that_it_cannot_start(fields: dict[str, Any], why: str) -> None:
    one = spec(**fields)
    with pytest.raises(ValueError, match=f"^server_nodes 2: .*{why}"):
        OVER_NODES.command(one, one.command(), ("sh", "server_0.sh"))


def test_devices_must_have_the_same_names_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES GPU-1,GPU-2: must be numbers of GPUs"):
        line_of(spec(devices=(0, 1)))


@pytest.mark.parametrize(
    ("log", "meaning"),
    [
        (
            "mpirun noticed that process rank 9 with PID 3 on node b exited on signal 9 (Killed).",
            "rank 9 of its 16 MPI ranks, on b, was ended by signal 9 (Killed)",
        ),
        (
            "  |    Process name: [prterun-a-7@1,7]\n  |    Exit code:    137\n",
            "rank 7 of its 16 MPI ranks, on a, ended with exit code 137",
        ),
        (
            "Process name: [[123,1],8]\n  Exit code:    1\n",
            "rank 8 of its 16 MPI ranks, on b, ended with exit code 1",
        ),
        (
            "[1,0]<stdout>: mpillm: trtllm-serve ended with exit code 2\n"
            "process rank 0 with PID 3 on node a exited on signal 15 (Terminated)",
            "trtllm-serve ended with exit code 2, and then its MPI ranks",
        ),
        ("all is well", ""),
    ],
)
def test_which_rank_has_ended(log: str, meaning: str) -> None:
    assert OVER_NODES.explain(spec(), log) == meaning


def config_of(**values: str) -> RunConfig:
    given = {"server": "trtllm-serve", "server_nodes": "2", "model_path": "/m", "tensor_parallelism": "16"}
    return RunConfig(layers_of({**given, **values}, FIELDS))


def test_the_plan_has_one_command_line_for_all_nodes() -> None:
    config = config_of()
    plan = disagg.plan(disagg.generate("aggregated", 3), 3, ["a", "a", "b"], 2, nodes_per_server=2)
    gpus = {1: tuple(range(8)), 2: tuple(range(8))}
    first, second = server_specs(config, plan, gpus)
    assert isinstance(first.launcher, NodesLauncher) and second.launcher is first.launcher
    lines = [" ".join(line.replace("\\\n", "").split()) for line in server_lines(plan, [first, second])]
    (line,) = [one for one in lines if "mpirun" in one]
    assert line.startswith("servers: CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 mpirun -n 16 ")
    assert "server 0 (trtllm-serve, part 2 of 2): rank 2 on b, GPUs 0-7" in lines
    with pytest.raises(
        ConfigError, match=r"server 0 has GPUs 0-7 on a, 0-3 on b; must have the same numbers"
    ):
        server_specs(config, plan, gpus | {2: tuple(range(4))})
