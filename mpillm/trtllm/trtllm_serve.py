"""`trtllm-serve`: endpoints, and the programs of disaggregated serving."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.command import Command
from mpillm.stages.disagg_servers import Programs
from mpillm.stages.servers import Server

INSTALL = "install TensorRT-LLM, as in NVIDIA's containers"
FIRST_PORT = 30000
"""Port of the first endpoint, as in NVIDIA's harness."""


def endpoints(
    program: str,
    model: Sequence[str],
    host: str,
    ports: Sequence[int],
    options: Mapping[str, object],
    config_option: str,
    extra: tuple[Path, str],
    n_ranks: int,
    n_gpus: int | None,
) -> list[Server]:
    """Return an endpoint on each port of `host`, each on `n_ranks` of `n_gpus` GPUs (None: unknown).

    `config_option`: the name of the option for the file `extra`, a path and its text.
    """
    servers = []
    for index, port in enumerate(ports):
        argv = [program, "serve", *model, "--host", host, "--port", str(port)]
        for name, value in options.items():
            if value is not None:
                argv += [f"--{name}", str(value)]
        argv += [config_option, str(extra[0])]
        env = {}
        if n_gpus is not None and len(ports) > 1:
            gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n_gpus)))).split(",")
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * n_ranks : (index + 1) * n_ranks])
        url = f"localhost:{port}"
        command = Command(tuple(argv), env)
        servers.append(
            Server(f"trtllm-serve {index}", command, {"HTTP": port}, (_health(url),), (url,), dict([extra]))
        )
    return servers


def disaggregated(program: str, path: str, ready_s: float, request_s: float) -> Programs:
    """Return the worker and the leader of the YAML at `path`.

    The leader gives workers `ready_s` to start and a request `request_s`.
    """
    return Programs(
        (program, "disaggregated_mpi_worker", "-c", path),
        (program, "disaggregated", "-c", path, "-t", str(int(ready_s)), "-r", str(int(request_s))),
    )


def _health(url: str) -> str:
    return f"http://{url}/health"
