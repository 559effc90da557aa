"""Base of the cores whose ranks are clients of servers: their servers and limits, and the servers' counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpillm.cores.base import CoreConfig, Credits, LLMCore, Metrics
from mpillm.cores.clients import MAX_PER_SERVER, Answers, share_of
from mpillm.cores.openai_client.server_reader import ServerReader

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms


class ClientCore(LLMCore):
    """One client of one or several servers, inside the run or outside."""

    is_client = True

    def __init__(
        self, config: CoreConfig, comms: InstanceComms | None, urls: Sequence[str], at_once: int | None
    ) -> None:
        """`urls`: of servers outside the run. `at_once`: requests at one server; None or 0: the default."""
        super().__init__(config, comms)
        client, at_once = config.client, at_once or MAX_PER_SERVER
        self.streams = config.settings.streaming or config.serves
        self._urls, self._at_once = (
            share_of(urls, at_once, config.instance, config.n_instances)
            if client.server is None
            else share_of([""], at_once, client.index, client.n_clients)
        )
        # One client of each server reads the server's counts.
        self._reads = client.index == 0 and (client.server is not None or config.instance < len(urls))
        self._reader: ServerReader | None = None
        self._answers = Answers()

    def flush(self) -> None:
        if self._reader is not None:
            self._reader.is_over = True

    def credits(self) -> Credits:
        return Credits(self._at_once * len(self._urls), 1 << 40)

    def _metrics(self, own: Metrics) -> Metrics:
        """Return the server's metrics if this is its only client; otherwise `own` with its KV cache usage."""
        if self._reader is None:
            return own
        client = self.config.client
        return self._reader.metrics(own, is_only_client=client.server is not None and client.n_clients == 1)
