"""Run `serve --server_role leader`: wait for the YAML's servers, route requests to them, drain at the end."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time

from disagg.errors import ConfigError
from disagg.instances import served_instances
from disagg.world_plan import check_pairs
from launch.event_loop import run_alone
from launch.logs import log_to
from launch.signals import Echoes, stop_signals
from mpillm.endpoint.admission import guard_of
from mpillm.endpoint.http_thread import bind, listen, url
from mpillm.endpoint.leader.leader_service import LeaderService
from mpillm.endpoint.leader.workers import Pool, Worker, new_session, wait_ready, watch
from mpillm.errors import ExitCode
from mpillm.options.disagg_values import router_arguments
from mpillm.options.disagg_yaml import ROLE_SECTIONS
from mpillm.options.run_config import RunConfig
from mpillm.roles.prefix_pool import PrefixRouting, make_pool

_log = logging.getLogger("mpillm")
_POLL_S = 0.1


def lead(config: RunConfig) -> int:
    """Run until a signal; return the exit code.

    NOT_READY: a server was not ready in time. INSTANCE_LOST: no server of one kind answered for
    --stall_timeout.
    """
    path, yaml = config.disagg_config, config.yaml
    if not path or yaml is None or yaml.mode != "disaggregated":
        raise ConfigError(
            "--server_role leader needs --disagg_config: a disaggregated YAML, whose servers it fronts",
            about=["server_role"],
        )
    check_pairs(yaml)
    workers = [Worker(instance) for instance in served_instances(yaml, path)]
    contexts, generations = (
        _pool([worker for worker in workers if worker.kind == kind], config, section)
        for kind, section in ROLE_SECTIONS.items()
    )
    bound = bind(yaml.hostname, yaml.port)
    log_to(sys.stdout, "%(asctime)s %(message)s", "%H:%M:%S", logging.WARNING)
    try:
        return run_alone(_Lead(config, contexts, generations).run(bound))
    finally:
        bound.close()


def _pool(workers: list[Worker], config: RunConfig, section: str) -> Pool:
    """Return the servers of a YAML section, with the section's router."""
    of = config.in_section(section)
    (server,) = (server for name, server in (config.yaml.sections if config.yaml else ()) if name == section)
    routing = PrefixRouting(**router_arguments(server, of.tokens_per_block))
    router = make_pool([*range(len(workers))], of.traffic_distribution_policy, routing)
    return Pool(workers[0].kind, workers, router)


class _Lead:
    def __init__(self, config: RunConfig, contexts: Pool, generations: Pool) -> None:
        self._config = config
        self._pools = contexts, generations
        self._workers = [*contexts.workers, *generations.workers]
        self._signals: list[int] = []
        self._echoes = Echoes()

    async def run(self, bound: socket.socket) -> int:
        config, loop = self._config, asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._note, number)
        async with new_session() as session:
            waiting = asyncio.ensure_future(
                wait_ready(session, self._workers, config.load_deadline, lambda text: _print(f"  {text}"))
            )
            while not waiting.done():
                await asyncio.sleep(_POLL_S)
                if self._signals:
                    waiting.cancel()
                    return 128 + self._signals[0]
            if late := waiting.result():
                names = "\n".join(f"  {worker.name}: {worker.failure}" for worker in late)
                print(
                    f"mpillm: not ready within {config.load_deadline:g} s (--load_deadline):\n{names}",
                    file=sys.stderr,
                    flush=True,
                )
                return ExitCode.NOT_READY
            host = config.yaml.hostname if config.yaml else ""
            service = LeaderService(
                *self._pools,
                session,
                silence_s=config.stall_timeout,
                guard=guard_of(config, host),
                max_retries=config.yaml.options.get("max_retries") if config.yaml else None,
            )
            runner, server = await listen(service.app(), bound)
            _print(f"  leading {len(self._workers)} servers at {url(bound)}")
            looking = asyncio.ensure_future(watch(session, self._workers))
            try:
                return await self._serve(service, server)
            finally:
                looking.cancel()
                await runner.cleanup()
                _print(f"  {service.answered} requests answered, {service.failed} errors")

    def _note(self, number: int) -> None:
        if not self._echoes.has(number):
            self._signals.append(number)

    async def _serve(self, service: LeaderService, server: asyncio.Server) -> int:
        while not self._signals:
            await asyncio.sleep(_POLL_S)
            for pool in self._pools:
                if pool.failed_for_s() > self._config.stall_timeout:
                    print(
                        f"mpillm: {pool.failures()}, for {self._config.stall_timeout:g} s (--stall_timeout)",
                        file=sys.stderr,
                        flush=True,
                    )
                    return ExitCode.INSTANCE_LOST
        service.guard.drain()
        server.close()
        end = time.monotonic() + self._config.drain_deadline
        while service.guard.active and time.monotonic() < end and len(self._signals) == 1:
            await asyncio.sleep(_POLL_S)
        return ExitCode.DONE


def _print(text: str) -> None:
    print(text, flush=True)
