"""A context or a generation server on rank 0: the routes, and the role of the instance."""

from __future__ import annotations

import dataclasses
import hashlib
import socket
from typing import Any

from disagg.errors import ConfigError
from mpillm.comms.transport import Transport
from mpillm.cores.base import LLMCore
from mpillm.cores.capabilities import TransfersKvToRuns
from mpillm.cores.registry import BackendRegistry
from mpillm.endpoint.admission import is_loopback
from mpillm.endpoint.disagg.instances import Arrival, ContextServer, GenerationServer
from mpillm.endpoint.disagg.kv_socket import KvStore
from mpillm.endpoint.disagg.opaque_state import Seal
from mpillm.endpoint.disagg.routes import DisaggRoutes, KvFormat
from mpillm.options.disagg_yaml import ROLE_SECTIONS
from mpillm.options.run_config import RunConfig
from mpillm.roles.instance import InstanceRole

_ALL_ADDRESSES = ("0.0.0.0", "::")


class DisaggServer:
    """A context or a generation server."""

    def __init__(self, config: RunConfig, model: Any, url: str) -> None:
        """`model`: the result of the core's check; `url`: the endpoint's.

        Raises ConfigError if the core cannot be such a server.
        """
        role = config.disagg_role
        timeout_s = config.in_section(ROLE_SECTIONS[role]).kv_transfer_timeout_ms / 1000
        if not issubclass(BackendRegistry.get(config.core_type), TransfersKvToRuns):
            raise ConfigError(
                f"--core_type {config.core_type} can't be a {role} server: its KV caches stay in its own run",
                about=["core_type", "server_role"],
            )
        if timeout_s >= config.stall_timeout:
            raise ConfigError(
                f"{config.named('kv_transfer_timeout_ms')} must be less than {config.named('stall_timeout')},"
                " after which an instance with outstanding requests counts as stalled"
            )
        secret = config.launch_secret or (config.kv_secret.text if config.kv_secret else None)
        if secret is None and not is_loopback(config.host):
            raise ConfigError(
                f"--server_role {role} at {config.host} needs a secret shared with the other servers: set"
                " MPILLM_KV_SECRET in the environment of all of them",
                about=["server_role", "host"],
            )
        self._arrivals: dict[int, Arrival] = {}
        self._store = KvStore(config.host, timeout_s) if role == "context" else None
        host = socket.gethostname() if config.host in _ALL_ADDRESSES else config.host
        name = (
            config.instance_run.instance.name
            if config.instance_run
            else f"{role} server {url.removesuffix('/v1')}"
        )
        shape = dataclasses.replace(model.config, dtype="", quantization="none", kv_quantization="none")
        kv = KvFormat(
            f"model {hashlib.sha256(repr(shape).encode()).hexdigest()[:8]},"
            f" {model.config.n_layers} layers of {model.config.n_kv_heads} heads of {model.config.head_dim}"
            f" in {model.kv_dtype}",
            model.config.kv_bytes_per_token(model.kv_dtype),
        )
        seal = Seal(secret)
        self.routes = DisaggRoutes(role, name, kv, host, self._store, self._arrivals, timeout_s, seal)

    def role(self, core: LLMCore, route: Transport, leader: int, instance: int) -> InstanceRole:
        """Return the role of the instance's root rank."""
        if self._store is not None:
            return ContextServer(core, route, leader, instance, self._store)
        assert isinstance(core, TransfersKvToRuns)  # `__init__` has checked the core's class
        self.routes.new_cache = core.new_cache
        return GenerationServer(core, route, leader, instance, self._arrivals)
