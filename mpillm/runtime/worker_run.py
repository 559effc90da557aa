"""Ranks of one mpirun as the servers of a disaggregation YAML: each instance is a separate run and server."""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from mpi4py import MPI

from disagg.errors import ConfigError
from disagg.instances import served_instances
from launch.launcher import EveryRankError
from mpillm.comms.communicators import RunComms
from mpillm.comms.start import node_name
from mpillm.cores.registry import BackendRegistry
from mpillm.devices import of_instance
from mpillm.options.run_config import InstanceRun, RunConfig
from mpillm.options.sources import OptionValue, Source


class WorkerRun(NamedTuple):
    """Configuration and communicators of a rank of a worker's mpirun."""

    config: RunConfig
    comms: RunComms  # communicators of the ranks of its instance


def worker_run(config: RunConfig, control: MPI.Intracomm) -> WorkerRun:
    """Return this rank's instance of the YAML, and the configuration of its server.

    Collective over `control`. Raises EveryRankError if the YAML can't be served by these ranks.
    """
    path, yaml = config.disagg_config, config.yaml
    if not path or yaml is None:
        raise EveryRankError(
            "--server_role worker needs --disagg_config: the YAML whose instances are served"
        )
    try:
        instances = served_instances(yaml, path)
    except ConfigError as error:
        raise EveryRankError(str(error)) from None
    if yaml.mode != "disaggregated":
        raise EveryRankError(f"{path}: {yaml.mode}; workers are context_servers and generation_servers")
    if control.size != yaml.n_workers:
        raise EveryRankError(
            f"{path} has {yaml.n_workers} workers, but {control.size} ranks were started; start"
            f" {yaml.n_workers}"
        )
    (own,) = (instance for instance in instances if control.rank in instance.ranks)
    _keep_own_gpus(config, control, own.ranks)
    node = control.Split_type(MPI.COMM_TYPE_SHARED)
    part = InstanceRun(own, node.size)
    node.Free()
    world = cast("MPI.Intracomm", control.Split(own.index, control.rank))
    host, _, port = own.url.rpartition(":")
    values: dict[str, str | int] = {"host": host, "port": int(port)}
    if config.log_dir:
        values["log_dir"] = str(Path(config.log_dir) / f"{own.kind}_{own.index}")
    where = f"{path}: {own.section}.urls"
    instance_config = copy.copy(config)
    instance_config.disagg_role, instance_config.instance_run = own.kind, part
    instance_config.launch_secret = control.bcast(secrets.token_hex(), 0)  # rank 0's secret
    instance_config.option_values = config.option_values | {
        name: OptionValue(value, Source.YAML, where) for name, value in values.items()
    }
    return WorkerRun(instance_config, RunComms(world, world.Dup(), world.Dup()))


def _keep_own_gpus(config: RunConfig, control: MPI.Intracomm, ranks: Sequence[int]) -> None:
    """Make only the GPUs of this rank's instance visible, because its run divides all visible GPUs.

    Call before CUDA starts. Collective over `control`. Raises EveryRankError if a node has too few GPUs.
    """
    core = BackendRegistry.get(config.core_type)
    if not core.uses_gpus:
        return
    nodes, gpus = zip(*control.allgather((node_name(), core.gpus())), strict=True)
    try:
        own = of_instance(config.device, ranks, control.rank, nodes, gpus)
    except ConfigError as error:
        raise EveryRankError(str(error)) from None
    if own:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in own)
