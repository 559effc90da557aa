"""``python -m mpillm serve``: an HTTP endpoint before the ranks, until a signal ends it.

With --server_role leader it fronts other servers: that needs no MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from disagg.errors import ConfigError
from mpillm.commands.run import start_rank
from mpillm.config.options import parse_serve

if TYPE_CHECKING:  # they need MPI
    from mpillm.comms.communicators import RunComms
    from mpillm.config.options import RunConfig
    from mpillm.run.rank0 import Purpose
    from mpillm.run.share import Share


def main(argv: Sequence[str]) -> int:
    """Run ``python -m mpillm serve`` on one rank."""
    if any("leader" in word for word in argv):  # otherwise errors are told once for all ranks
        config = parse_serve(argv)
        if config.server_role == "leader":
            try:
                from mpillm.serve.leader_run import lead
            except ImportError as error:
                raise ConfigError(f"serve needs aiohttp ({error}): pip install 'mpillm[http]'") from error
            return lead(config)
    code, _ = start_rank("serve", argv, parse_serve, _serve, serves=True, share=_share)
    return code


def _share(config: RunConfig, comms: RunComms) -> Share:
    from mpillm.run.share import Share, share

    if config.server_role == "worker":
        return share(config, comms.control)
    return Share(config, comms)


def _serve() -> Purpose:
    from mpillm.run.serve_session import SERVE

    return SERVE
