"""LLMCore: the seam between the SPMD world and a backend.

One core runs on every rank of an instance; only the instance leader's core is given requests. A core is driven by its rank's event
loop and never waits: `enqueue` takes a batch, `poll_responses` does a bounded piece of work (one engine step, one look at a socket)
and returns what has become ready.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import numpy as np

from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch
from mpillm.config.core_config import CoreConfig
from mpillm.devices import Gpu, visible_gpus

__all__ = ["CoreConfig", "Credits", "LLMCore", "Metrics", "ModelLimits"]

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.comms.mover import Mover, Peer


class Credits(NamedTuple):
    """What an instance can hold at once, waiting requests included."""

    requests: int
    tokens: int  # KV cache, in tokens


class Metrics(NamedTuple):
    """What a core has computed since `start_test`, and what it holds now."""

    prompt_tokens: int  # of contexts; what is computed again after a preemption counts again, what block reuse saves does not
    generated_tokens: int
    running: int  # requests
    waiting: int  # requests
    kv_cache_usage: float | None = None  # of its blocks, 0 to 1; None: it has no KV cache


class ModelLimits(Protocol):
    """What the harness must know of a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def max_prompt_len(self) -> int | None: ...


class LLMCore(ABC):
    """A backend. Raise from any method: the error names this rank and ends the run everywhere."""

    # What commands must know of a core before one is made.
    uses_gpus: ClassVar[bool] = False  # each rank takes a GPU where there is one
    needs_model: ClassVar[bool] = False  # computes a model in this process: needs --model_path, and has the precisions of our options
    is_client: ClassVar[bool] = False  # of servers elsewhere: each worker rank is an executor of its own, whatever the servers' layout
    engine_stages: ClassVar[str | None] = None  # ``module:function``: from a RunConfig to the last stage of `generate-engines`
    servers: ClassVar[str | None] = None  # ``module:function``: from a RunConfig to what `run-llm-server` starts
    framework: ClassVar[str | None] = None  # what computes, for the description of a submission's system
    packages: ClassVar[tuple[str, ...]] = ()  # whose versions that description names; the framework's first

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        """`comms` are the instance's (None: it has one rank, this one). Cheap: no weights, no sockets; `load` does that."""
        self.config = config
        self.comms = comms

    @classmethod
    def check(cls, config: CoreConfig) -> ModelLimits | None:
        """Find what is wrong with `config` before any rank loads anything (ConfigError); the model's limits, if it has a model."""
        return None

    @classmethod
    def gpus(cls) -> tuple[Gpu, ...]:
        """The GPUs of this node that a rank of this core could take, as this process counts them."""
        return (visible_gpus() or ()) if cls.uses_gpus else ()

    # --- life ---

    @abstractmethod
    def load(self) -> None:
        """Load weights, start or connect to a server. May take minutes; runs under the load deadline."""

    @abstractmethod
    def run_health_check(self) -> None:
        """Prove that the backend answers; raise if it does not.

        Called on every rank of an instance. One that follows its leader returns at once: it is polled from then on, as at any time.
        """

    def warm_up_requests(self) -> Batch:
        """What is run through this instance before `ready`: by default two short greedy requests."""
        rows = np.zeros(2, REQUEST)
        rows["id"] = [0, 1]
        rows["n_tokens"] = 8
        rows["max_output"] = rows["min_output"] = 4
        rows["top_p"] = 1
        rows["generation"] = NO_INSTANCE
        return Batch(rows, np.full(16, 3, np.int32))

    def start_test(self) -> None:  # noqa: B027 - optional: not every core counts
        """The warm-up is over and nothing is in flight: reset what counts requests."""

    def statistics(self) -> dict[str, float]:
        """Counts of the test for `result.json`, beside samples, tokens and busy time: preemptions, for one."""
        return {}

    def compiled_in_test(self) -> list[str]:
        """What this rank has compiled since `start_test`: nothing, if the warm-up did all that the test can meet."""
        return []

    def metrics(self) -> Metrics | None:
        """What is computed so far, answers that have not ended included; None if the core does not know.

        Asked on the instance's leader, twice a second and between two polls: it must not wait for anything.
        """
        return None

    def flush(self) -> None:  # noqa: B027 - optional: most cores hold nothing back
        """Give up nothing, hold nothing back: called when no more requests will come."""

    def notify_stop(self) -> None:  # noqa: B027 - optional: not every core owns something to stop
        """Release servers, threads and memory. Called once, also after an error."""

    # --- work ---

    @abstractmethod
    def credits(self) -> Credits:
        """What this instance can hold, asked once after `load`."""

    @abstractmethod
    def enqueue(self, requests: Batch) -> None:
        """Take requests (REQUEST rows). A request with `generation` set stops after its first token (see `started`)."""

    @abstractmethod
    def poll_responses(self) -> Batch | None:
        """Do a bounded piece of work; RESPONSE rows that became ready, or None.

        Each request gives a FIRST row and a FINAL row, or one row with both flags. A context-only request gives FIRST alone
        (FIRST | FINAL when that first token already ends the answer).
        """

    @abstractmethod
    def has_work(self) -> bool:
        """Whether `poll_responses` has something to do now (False lets the rank sleep)."""

    def cancel(self, ids: Iterable[int]) -> None:  # noqa: B027 - optional: a request then just runs to its end
        """Give up requests wherever they are: each that has not ended gives one row, FINAL | CANCELLED and no tokens, and nothing more.

        An id that has ended, or never was, is passed over: its FINAL row may be on the way. So is a context-only request that `started`
        may have named: it is the receiver's, there to be cancelled from `receive_kv` on, and `release_kv` frees it here.
        """

    # --- handoff of the KV cache (see roles/handoff.py): both sides, then the context side, then the generation side ---

    def connect(self, mover: Mover, peers: dict[int, Peer]) -> None:
        """Before `load`, on every rank of an instance that hands over or takes over: with what, and (by instance) with whom."""
        raise RuntimeError(f"core {self.config.core_type} has no KV cache to hand over, and takes none")

    def poll_kv(self) -> list[int]:
        """Ids of requests whose KV cache has left this instance whole, or has arrived whole. Asked at every turn, on every rank."""
        return []

    def release_kv(self, request_id: int) -> None:
        """Give up the KV cache of a request that `started` has named; on the generation side, of one that has arrived."""
        raise RuntimeError(f"core {self.config.core_type} has no KV cache to hand over")

    def started(self) -> list[int]:
        """Ids of the context-only requests which have got the memory for their contexts since this was last asked.

        Asked before each `poll_responses`. Each of them keeps its memory until `release_kv`. Requests of a single token are not named.
        """
        return []

    def send_kv(self, request_id: int, receiver: int, slot: int) -> None:
        """Send the KV cache of a request that `started` has named, or as much as is computed of it and the rest as it will be.

        All ranks of instance `receiver` expect their pieces with tag ``Tag.KV + slot``. `poll_kv` tells when they have left.
        """
        raise RuntimeError(f"core {self.config.core_type} has no KV cache to hand over")

    def receive_kv(self, request: Batch, sender: int, slot: int) -> bool:
        """Reserve room for the KV cache of `request` (one row) and expect it from instance `sender`; False if there is no room yet."""
        raise RuntimeError(f"core {self.config.core_type} takes no KV cache")

    def admit(self, request: Batch, first_token: int) -> None:
        """The KV cache of `request` has arrived: generate on from `first_token`, as after `enqueue`.

        `request` is a batch of one row with its prompt. Only a FINAL row follows, with `first_token` as its first token.
        """
        raise RuntimeError(f"core {self.config.core_type} takes no KV cache")
