"""`trtllm-serve` over several nodes: an mpirun of `trtllm-llmapi-launch`.

The server needs all its ranks in one MPI world. `trtllm-llmapi-launch` starts the server beside rank 0, and
hands the ranks to the server.

Source: tensorrt_llm/llmapi/trtllm-llmapi-launch (020c89e6). This is not tested with TensorRT-LLM itself.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence

from launch.command import Command, NotHere, find_program
from launch.environment import clean_environment
from launch.find_mpirun import Mpi, detect
from launch.mpirun import command_line
from mpillm.programs.servers.kind import NodesLauncher, ServerSpec
from mpillm.programs.servers.server_options import python_of

_LAUNCH = "trtllm-llmapi-launch"
_INSTALL = "install TensorRT-LLM, as in NVIDIA's containers"
# trtllm-llmapi-launch prefers Slurm's rank to mpirun's. In a Slurm job, it is the rank of mpirun's daemon.
_WITHOUT_SLURM = ("env", "-u", "SLURM_PROCID", "-u", "SLURM_NTASKS")
_SIZES = ("--tp_size", "--pp_size", "--cp_size", "--tensor_parallel_size", "--pipeline_parallel_size")
# Open MPI passes on only its own variables to other hosts.
_EXPORTED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|(TLLM|TRTLLM|TRT_LLM|NCCL|UCX|NVSHMEM|HF|CUDA|NVIDIA|OMP)_\w{1,99}"
)
_BLANKS = re.compile(r"[\s*?\[\]\\]")
_ENDED = "mpillm: trtllm-serve ended with exit code"
# Messages of Open MPI 4 and 5; a displayed log has a bar before each line.
_LOST_RANK = re.compile(
    r"process rank (\d{1,6}) with PID \d{1,9} on node \S{1,255} exited on"
    r"[\s|]{1,20}(signal \d{1,3}[^\n.]{0,40})"
    r"|Process name: \[[^\n]{1,99},(\d{1,6})\][\s|]{1,20}Exit code: {1,9}(\d{1,3})"
)


def _command(spec: ServerSpec, server: Command, program: Sequence[str]) -> Command:
    """Return the mpirun line. Raises ValueError for a server that it cannot start."""
    if own := next((arg for arg in spec.args if arg.partition("=")[0] in _SIZES), None):
        raise ValueError(
            f"server_nodes {spec.node.n}: {own}: use --tensor_parallelism and --pipeline_parallelism, whose"
            " product is the number of MPI ranks"
        )
    if program != server.argv and _BLANKS.search(str(spec.base)):
        raise ValueError(
            f"server_nodes {spec.node.n}: {_LAUNCH} cannot start {spec.base}: use another --log_dir"
        )
    devices = server.env.get("CUDA_VISIBLE_DEVICES", "")
    if not re.fullmatch(r"[\d, ]*", devices):
        raise ValueError(
            f"server_nodes {spec.node.n}: CUDA_VISIBLE_DEVICES {devices}: must be numbers of GPUs,"
            " because all nodes of the server get the same value"
        )
    n_ranks = _n_ranks(spec)
    hosts = ",".join(f"{host}:{n_ranks // spec.node.n}" for host in spec.node.hosts)
    names = {name for name in (*clean_environment(os.environ), *server.env) if _EXPORTED.fullmatch(name)}
    line = command_line(
        Mpi("openmpi", (4,), "mpirun"),
        n_ranks,
        [*_WITHOUT_SLURM, _LAUNCH, *program],
        ["-H", hosts, "--tag-output"],
        root=os.geteuid() == 0,
        cores=n_ranks,
        exports=sorted(names),
        survive=False,
    )
    return Command(tuple(line), server.env)


def _n_ranks(spec: ServerSpec) -> int:
    return math.prod(spec.values.get(name) or 1 for name in ("tensor_parallelism", "pipeline_parallelism"))


def _script(server: Command) -> str:
    """Return a script of the server.

    `trtllm-llmapi-launch` splits its arguments at blanks. If the server exits, it also waits forever, so the
    script ends rank 0, which is the parent of its parent.
    """
    return f"""#!/bin/sh
{shlex.join(server.argv)}
code=$?
echo "{_ENDED} $code"
[ "$code" -eq 0 ] || kill -TERM "$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$PPID/status")"
exit "$code"
"""


def _located(command: Command) -> Command:
    """Return the line with the mpirun that fits TensorRT-LLM's mpi4py. Raises ConfigError without one."""
    python = python_of(find_program("trtllm-serve", _INSTALL, typed=True))
    mpi = detect(python) if python else detect()
    if mpi.kind != "openmpi":
        raise NotHere(f"trtllm-serve over several nodes needs Open MPI, and mpi4py of {python} has {mpi}")
    launch = find_program(_LAUNCH, _INSTALL, typed=True)
    argv = [launch if arg == _LAUNCH else arg for arg in command.argv]
    return Command((mpi.mpirun, *argv[1:]), command.env)


def _explain(spec: ServerSpec, log: str) -> str:
    """Return how the server or one of its MPI ranks has ended, from the output of mpirun."""
    if match := re.search(rf"{_ENDED} (\d{{1,3}})", log):
        return f"trtllm-serve ended with exit code {match[1]}, and then its MPI ranks"
    if (match := _LOST_RANK.search(log)) is None:
        return ""
    rank = int(match[1] or match[3])
    how = f"was ended by {match[2]}" if match[1] else f"ended with exit code {match[4]}"
    host = spec.node.hosts[min(rank * spec.node.n // _n_ranks(spec), spec.node.n - 1)]
    return f"rank {rank} of its {_n_ranks(spec)} MPI ranks, on {host}, {how}"


OVER_NODES = NodesLauncher(_command, _script, _located, _explain)
