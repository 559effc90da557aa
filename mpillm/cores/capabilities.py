"""What some cores can do besides what `LLMCore` asks of all: a core whose class has the methods can do it.

Roles and commands ask with `isinstance` of a core, and with `issubclass` before one is made.
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
        """Return the ids of requests whose whole KV cache has left this instance, or arrived.

        Polled on every rank.
        """

    def send_kv(self, request_id: int, receiver: int, slot: int) -> None:
        """Send the KV cache of a request that `started` has named: what is computed now, the rest later.

        All ranks of instance `receiver` expect their pieces with tag ``Tag.KV + slot``. `poll_kv` reports
        when they have left.
        """

    def release_kv(self, request_id: int) -> None:
        """Free the KV cache of a request that `started` has named; on the generation side, an arrived one."""


class ReceivesKv(Protocol):
    """The generation side of a handoff: see roles/handoff.py."""

    def poll_kv(self) -> list[int]:
        """See `SendsKv`."""

    def release_kv(self, request_id: int) -> None:
        """See `SendsKv`."""

    def cancel(self, ids: Iterable[int]) -> None:
        """As of `LLMCore`; from `receive_kv` on."""

    def receive_kv(self, request: Batch, sender: int, slot: int) -> bool:
        """Reserve room for the KV cache of `request` (one row), and expect it from instance `sender`.

        Returns False while there is no room.
        """

    def admit(self, request: Batch, first_token: int) -> None:
        """Continue `request`, whose KV cache has arrived, after `first_token`, as if by `enqueue`.

        `request`: a batch of one row with its prompt. Only a FINAL row follows; its first token is
        `first_token`.
        """


@runtime_checkable
class HandsOver(SendsKv, ReceivesKv, Protocol):
    """Hands KV caches over to other instances, and takes them."""

    def connect(self, mover: Mover, peers: dict[int, Peer]) -> None:
        """Set the mover, and the peers by instance; called before `load` on every rank with a handoff.

        No peers: the partner is another run (`HandsOverToRuns`).
        """

    def lose_peer(self, instance: int) -> None:
        """Go on without a partner of handoffs: what moves, or would, to or from it is done at once.

        `poll_kv` reports it, whether it has left or arrived or not. Called on every rank.
        """

    def cancel(self, ids: Iterable[int]) -> None:
        """As of `LLMCore`.

        Context-only requests that `started` may have named are ignored: the receiver cancels them from
        `receive_kv` on, and `release_kv` frees them here.
        """

    def started(self) -> list[int]:
        """Return the ids of context-only requests that got memory for their contexts since the last call.

        Called before each `poll_responses`. Each keeps its memory until `release_kv`. Requests of a single
        token are not named.
        """


@runtime_checkable
class WorksInAnyThread(Protocol):
    """Takes requests and gives answers in any thread, one at a time, as long as that is a server's client."""

    def share(self, thread: ClientThread) -> None:
        """Have the client on this thread, which has the run's endpoint. Called before `load`, if at all."""


class OwnMemory(Protocol):
    """The end of a handoff that is this rank's memory."""

    def take(self, request_id: int, slot: int, n_tokens: int) -> None:
        """Expect the cache of a request under `slot`."""

    def give(self, request_id: int, slot: int, n_tokens: int, cache: Cache) -> None:
        """Send the cache of a request under `slot`, under which the instance expects it."""

    def poll(self) -> dict[int, Cache]:
        """Return the caches that have arrived, or left, by request."""


@runtime_checkable
class HandsOverToRuns(HandsOver, Protocol):
    """Hands KV caches over to other runs, too (`serve --server_role`), by way of a rank's memory."""

    def host_end(self) -> OwnMemory:
        """Make the handoff's other end in this rank's memory.

        Called on the instance's leader after `load`, if `connect` has named no peers.
        """

    def new_cache(self, n_bytes: int) -> Cache:
        """Return memory for a cache that this end is to give. Called in any thread."""


@runtime_checkable
class TellsSteps(Protocol):
    """Knows the steps that it computes."""

    def record_steps(self, recorder: Recorder) -> None:
        """Note each step in `recorder` from now on. Called on every rank at the start of the test."""


@runtime_checkable
class TellsCompilations(Protocol):
    """Compiles code while it runs."""

    def compiled_in_test(self) -> list[str]:
        """Return what this rank has compiled since `start_test`: nothing, if the warm-up was complete."""


@runtime_checkable
class FindsServers(Protocol):
    """A client of servers that ranks of the run may own."""

    def find_servers(self, urls: Mapping[int, str]) -> None:
        """Hear where these servers are, by their index: all ranks have loaded."""


@runtime_checkable
class OutlivesServer(Protocol):
    """A client of a server that the run may start again."""

    @property
    def waits_for_server(self) -> bool:
        """Whether what it owes waits for the server."""

    def server_lost(self) -> None:
        """Keep what the server owes, and ask it nothing: it is started again."""

    def server_back(self, url: str) -> None:
        """Warm the server up, which is at `url` now, and ask it what it owed."""


@runtime_checkable
class NamesFrameworks(Protocol):
    """A client whose servers say what they are."""

    def frameworks(self) -> list[str]:
        """Return what computes the answers and its version, for the description of a submission's system.

        Empty if one of the servers does not say.
        """
