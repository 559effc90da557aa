"""Optional features of cores: a core supports a feature if its class has the methods of the protocol.

Roles and commands check with `isinstance`, or with `issubclass` before a core exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpillm.comms.messages import Batch
    from mpillm.comms.mover import Mover, Peer
    from mpillm.cores.openai_client.client_thread import ClientThread
    from mpillm.telemetry.recorder import Recorder

Cache = NDArray[np.uint8]  # a request's KV cache, shape [bytes]


class SendsKv(Protocol):
    """The context side of a handoff: see roles/handoff.py."""

    def poll_kv(self) -> list[int]:
        """Return the ids of requests whose complete KV cache was sent or has arrived since the last call.

        Polled on every rank.
        """

    def send_kv(self, request_id: int, receiver: int, slot: int) -> None:
        """Send the KV cache of a request from `started`: the computed part now, the other parts later.

        All ranks of instance `receiver` receive their pieces with tag ``Tag.KV + slot``. `poll_kv` reports
        when all pieces are sent.
        """

    def release_kv(self, request_id: int) -> None:
        """Free the KV cache of a request from `started`; on the generation side, a KV cache that arrived."""


class ReceivesKv(Protocol):
    """The generation side of a handoff: see roles/handoff.py."""

    def poll_kv(self) -> list[int]:
        """See `SendsKv`."""

    def release_kv(self, request_id: int) -> None:
        """See `SendsKv`."""

    def cancel(self, ids: Iterable[int]) -> None:
        """Do as `LLMCore.cancel`, also for requests whose KV cache `receive_kv` receives."""

    def receive_kv(self, request: Batch, sender: int, slot: int) -> bool:
        """Reserve blocks for the KV cache of `request` (one row), and receive it from instance `sender`.

        Returns False while there are too few free blocks.
        """

    def admit(self, request: Batch, first_token: int) -> None:
        """Continue `request`, whose KV cache has arrived, after `first_token`, as if by `enqueue`.

        `request`: a batch of one row with its prompt. No FIRST row follows; the FINAL row's tokens begin with
        `first_token`.
        """


@runtime_checkable
class ResetsPrefixCache(Protocol):
    """Can empty the prefix cache of its instance: see `CoreConfig.resets_prefix_cache`."""

    def reset_prefix_cache(self) -> None:
        """Let no later request find a prompt that is cached now. Called on the root rank."""


@runtime_checkable
class TransfersKv(SendsKv, ReceivesKv, Protocol):
    """Transfers KV caches to other instances, and receives them."""

    def connect(self, mover: Mover, peers: dict[int, Peer]) -> None:
        """Set the mover, and the peers by instance. Called before `load` on every rank with a handoff.

        Without peers, the partner is another run (`TransfersKvToRuns`).
        """

    def lose_peer(self, instance: int) -> None:
        """Continue without a peer: current and later transfers with it end immediately.

        `poll_kv` reports them like complete transfers. Called on every rank.
        """

    def cancel(self, ids: Iterable[int]) -> None:
        """Do as `LLMCore.cancel`.

        Context-only requests that `started` may have returned are ignored here: the receiving instance
        cancels them, and `release_kv` frees them in this one.
        """

    def started(self) -> list[int]:
        """Return the ids of context-only requests that got memory for their contexts since the last call.

        Called before each `poll_responses`. Each keeps its memory until `release_kv`. Requests for a single
        token are not included.
        """


@runtime_checkable
class WorksInAnyThread(Protocol):
    """Accepts requests and returns answers in any thread, one thread at a time, like a client of servers."""

    def share(self, thread: ClientThread) -> None:
        """Run the client on this thread, which serves the run's endpoint. If called, then before `load`."""


class OwnMemory(Protocol):
    """The end of KV cache transfers that is in this rank's memory."""

    def take(self, request_id: int, slot: int, n_tokens: int) -> None:
        """Receive the cache of a request under `slot`."""

    def give(self, request_id: int, slot: int, n_tokens: int, cache: Cache) -> None:
        """Send the cache of a request under `slot`. The instance receives it under the same slot."""

    def poll(self) -> dict[int, Cache]:
        """Return the caches that have arrived, or were sent, by request."""


@runtime_checkable
class TransfersKvToRuns(TransfersKv, Protocol):
    """Also transfers KV caches to other runs (`serve --server_role`), through a rank's memory."""

    def host_end(self) -> OwnMemory:
        """Create the other end of the instance's transfers, in this rank's memory.

        Called on the instance's root rank after `load`, if `connect` had no peers.
        """

    def new_cache(self, n_bytes: int) -> Cache:
        """Return memory for a cache that this end will send. Called in any thread."""


@runtime_checkable
class RecordsSteps(Protocol):
    """Records the steps that it computes."""

    def record_steps(self, recorder: Recorder) -> None:
        """Note each step in `recorder` from now on. Called on every rank at the start of the test."""


@runtime_checkable
class ReportsCompilations(Protocol):
    """Compiles code while it runs."""

    def compiled_in_test(self) -> list[str]:
        """Return the names of code that this rank has compiled since `start_test`.

        The list is empty if the warm-up was complete.
        """


@runtime_checkable
class FindsServers(Protocol):
    """A client of servers that ranks of the run may own."""

    def find_servers(self, urls: Mapping[int, str]) -> None:
        """Set the servers' URLs, by index. Called when all ranks have loaded."""


@runtime_checkable
class OutlivesServer(Protocol):
    """A client of a server that the run may start again."""

    @property
    def waits_for_server(self) -> bool:
        """Whether outstanding requests wait for the server."""

    def server_lost(self) -> None:
        """Keep the outstanding requests, and send none: the server is being restarted."""

    def server_back(self, url: str) -> None:
        """Warm up the server, which is now at `url`, and send it the outstanding requests."""


@runtime_checkable
class NamesFrameworks(Protocol):
    """A client whose servers report their names."""

    def frameworks(self) -> list[str]:
        """Return names and versions of the servers' software, for the system description of a submission.

        Empty if one of the servers does not report its name.
        """
