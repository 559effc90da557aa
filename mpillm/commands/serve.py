"""``python -m mpillm serve``: an HTTP endpoint for the ranks, until a signal ends it.

With --server_role leader, it routes to other servers and needs no MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from disagg.errors import ConfigError
from launch.environment import write_exit_code
from launch.launcher import EveryRankError, find_launcher
from mpillm.commands.run import start_rank
from mpillm.options.options import parse_serve
from mpillm.options.unused_options import unused_in_role

if TYPE_CHECKING:  # these modules need MPI
    from mpillm.comms.communicators import RunComms
    from mpillm.options.run_config import RunConfig
    from mpillm.runtime.run_session import RunSession
    from mpillm.runtime.worker_run import WorkerRun


def main(argv: Sequence[str]) -> int:
    """Run ``python -m mpillm serve`` on one rank."""
    if any("leader" in word for word in argv):
        try:
            code = _lead(parse_serve(argv))
        except ConfigError as error:
            raise EveryRankError(str(error)) from error
        if code is not None:
            write_exit_code(code)
            return code
    code, _ = start_rank("serve", argv, parse_serve, _serve, serves=True, share=_share)
    return code


def _lead(config: RunConfig) -> int | None:
    """Run the leader and return the exit code; None for another role."""
    if config.server_role != "leader":
        return None
    launcher = find_launcher()
    if launcher is not None and (launcher.size or 1) > 1:
        raise ConfigError(
            f"--server_role leader is one process, but {launcher.name} has started {launcher.size}"
        )
    try:
        from mpillm.endpoint.leader.leader_run import lead
        from mpillm.runtime.yaml_effects import check_leaders_yaml
    except ImportError as error:
        raise ConfigError(f"serve needs aiohttp ({error}): pip install 'mpillm[http]'") from error
    for line in [*check_leaders_yaml(config), *unused_in_role(config)]:
        print(f"  {line}", flush=True)
    return lead(config)


def _share(config: RunConfig, comms: RunComms) -> WorkerRun:
    from mpillm.runtime.worker_run import WorkerRun, worker_run

    if config.server_role == "worker":
        for line in unused_in_role(config) if comms.control.rank == 0 else ():
            print(f"  {line}", flush=True)
        return worker_run(config, comms.control)
    if config.server_role == "leader":
        raise EveryRankError(
            "--server_role leader needs no ranks: write it on the command line" + config.set_by("server_role")
        )
    return WorkerRun(config, comms)


def _serve(config: RunConfig | None) -> type[RunSession]:
    from mpillm.runtime.serve_session import ServeSession

    return ServeSession
