"""LLMCore: the interface between the SPMD world and a backend.

One core runs on every rank of an instance; only the instance leader's core receives requests. Its rank's
event loop drives a core, which never waits: `enqueue` takes a batch, `poll_responses` does a bounded piece of
work (one engine step, one look at a socket) and returns what has become ready.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch
from mpillm.config.core_config import CoreConfig
from mpillm.devices import Gpu, visible_gpus
from mpillm.telemetry.recorder import Recorder

__all__ = ["CoreConfig", "Credits", "LLMCore", "Metrics", "ModelLimits", "StatedLimits", "short_requests"]

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.comms.mover import Mover, Peer
    from mpillm.engine.handoff.host_end import HostEnd
    from mpillm.engine.lora import Adapter
    from mpillm.engine.special import Special


class Credits(NamedTuple):
    """What an instance can hold at once, including waiting requests."""

    requests: int
    tokens: int  # KV cache, in tokens


class Metrics(NamedTuple):
    """What a core has computed since `start_test`, and what it holds now."""

    # Tokens computed again after a preemption count again; tokens saved by block reuse don't count.
    prompt_tokens: int
    generated_tokens: int
    running: int  # requests
    waiting: int  # requests
    kv_cache_usage: float | None = None  # of its blocks, 0 to 1; None: it has no KV cache


class ModelLimits(Protocol):
    """What the harness must know about a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def max_prompt_len(self) -> int | None: ...


class StatedLimits(NamedTuple):
    """`ModelLimits` as numbers; by default none limits anything."""

    vocab_size: int = 1 << 31
    max_seq_len: int = 1 << 31
    max_prompt_len: int | None = None


class LLMCore(ABC):
    """A backend. An error from any method names this rank, and ends the run on all ranks."""

    # What commands must know about a core before they make one.
    uses_gpus: ClassVar[bool] = False  # each rank takes a GPU where there is one
    # Computes a model in this process: needs --model_path, and supports the precisions of our options.
    needs_model: ClassVar[bool] = False
    has_host_end: ClassVar[bool] = False  # see `host_end`
    # A client of servers elsewhere: each worker rank is an executor, whatever the servers' layout.
    is_client: ClassVar[bool] = False
    # Answers requests with `logprobs` with LOGPROBS rows.
    gives_logprobs: ClassVar[bool] = False
    # Honours --speculative_config.
    speculates: ClassVar[bool] = False
    # Honours --enable_max_num_tokens_tuning.
    tunes_steps: ClassVar[bool] = False
    # ``module:function``: from a RunConfig to the last stage of `generate-engines`.
    engine_stages: ClassVar[str | None] = None
    # ``module:function``: from a RunConfig and the command's words to what `run-llm-server` starts.
    servers: ClassVar[str | None] = None
    # ``module:function``: from a RunConfig and the disaggregation YAML of its options to the one that its
    # servers read. None: that YAML as it is.
    disagg_yaml: ClassVar[str | None] = None
    # A package whose import is collective over MPI.COMM_WORLD: every rank imports it in phase load.
    world_import: ClassVar[str | None] = None
    framework: ClassVar[str | None] = None  # for the system description of a submission
    imports: ClassVar[tuple[str, ...]] = ()  # packages that it can't do without, imported in `load`
    packages: ClassVar[tuple[str, ...]] = ()  # those that it names with versions; the framework's first

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        """Be cheap: weights and sockets are for `load`. `comms`: the instance's; None: one rank."""
        self.config = config
        self.comms = comms
        self.streams = True
        """Whether an answer's first token is told when it comes; not: with the whole answer."""
        self.waits_for_server = False
        """Whether what it owes waits for a server of the run's own that is started again."""
        self.awaits = ""
        """What `load` waits for, in a few words. Any thread may set it."""
        self.wake: Callable[[], None] = lambda: None
        """Wakes the rank, which then looks at `has_work`. Any thread may call it. The run sets it before
        `load`."""

    @classmethod
    def check(cls, config: CoreConfig) -> ModelLimits | None:
        """Check `config` before any rank loads (ConfigError); return the model's limits, if it has one."""
        return None

    @classmethod
    def gpus(cls) -> tuple[Gpu, ...]:
        """Return the GPUs of this node that a rank of this core could take, as this process numbers them."""
        return (visible_gpus() or ()) if cls.uses_gpus else ()

    # --- life ---

    @abstractmethod
    def load(self) -> None:
        """Load weights, or start or connect to a server. May take minutes, within the load deadline."""

    def find_servers(self, urls: Mapping[int, str]) -> None:  # noqa: B027 - for clients of the run's own servers
        """Hear where the servers are that ranks of this run own, by their index: all ranks have loaded."""

    def server_lost(self) -> None:
        """Keep what the run's own server owes, and ask it nothing: it is started again."""
        raise NotImplementedError(f"{type(self).__name__} waits for no server")

    def server_back(self, url: str) -> None:
        """Warm the server up, which is at `url` now, and ask it what it owed."""
        raise NotImplementedError(f"{type(self).__name__} waits for no server")

    def doing(self) -> str:
        """Return how far `load` or the warm-up has come, or what it waits for, in a few words; "": unknown.

        The console shows it while a person waits. Another thread calls this, twice a second.
        """
        return self.awaits

    @abstractmethod
    def run_health_check(self) -> None:
        """Prove that the backend answers; raise if it does not.

        Called on every rank of an instance. A rank that follows its leader returns at once, and is polled.
        """

    def warm_up_requests(self) -> Batch:
        """Return the requests that warm this instance up before `ready`: by default two short greedy ones."""
        return short_requests(2, min_output=4)

    def start_test(self) -> None:  # noqa: B027 - optional: not every core counts
        """Reset counters of requests: the warm-up is over, and nothing is in flight."""

    def record_steps(self, recorder: Recorder) -> bool:
        """Note each step in `recorder` from now on; return False if this core does not know its steps.

        Called on every rank at the start of the test.
        """
        return False

    def statistics(self) -> dict[str, float]:
        """Return further counts of the test for `result.json`, such as preemptions."""
        return {}

    def frameworks(self) -> list[str]:
        """Return, for a client, what computes the answers and its version, as its servers say.

        Empty if one of them does not say. For the system description of a submission.
        """
        return []

    def compiled_in_test(self) -> list[str]:
        """Return what this rank has compiled since `start_test`: nothing, if the warm-up was complete."""
        return []

    def metrics(self) -> Metrics | None:
        """Return what has been computed so far, including unfinished answers; None if the core does not know.

        Called on the instance's leader twice a second, between polls, so it must not wait.
        """
        return None

    def flush(self) -> None:  # noqa: B027 - optional: most cores hold nothing back
        """Hold nothing back: no more requests will come."""

    def notify_stop(self) -> None:  # noqa: B027 - optional: not every core owns something to stop
        """Release servers, threads and memory. Called once, also after an error."""

    # --- work ---

    @abstractmethod
    def credits(self) -> Credits:
        """Return what this instance can hold; called once, after `load`."""

    @abstractmethod
    def enqueue(self, requests: Batch) -> None:
        """Take requests (REQUEST rows). One with `generation` set stops after its first token: `started`."""

    @property
    def takes_special(self) -> bool:
        """Whether `enqueue_special` works here; known after `load`."""
        return False

    def enqueue_special(self, requests: Batch, specials: Mapping[int, Special]) -> None:
        """As `enqueue`, with what some of them ask for besides, by id; see there what comes back."""
        raise RuntimeError(f"core {self.config.core_type} takes no more than a request's row says")

    def make_adapter(self, weights: NDArray[Any], config: NDArray[np.int32]) -> Adapter:
        """Make a LoRA adapter for `Special.adapter`. Raises ValueError if it does not fit the model."""
        raise RuntimeError(f"core {self.config.core_type} has no adapters")

    @abstractmethod
    def poll_responses(self) -> Batch | None:
        """Do a bounded piece of work; return RESPONSE rows that became ready, or None.

        Each request yields a FIRST row and a FINAL row, or one row with both flags. A context-only request
        yields only FIRST (FIRST | FINAL if the first token ends the answer). One with STREAM also yields
        PARTIAL rows between the two, if the core can; FINAL has the whole answer all the same.
        """

    @abstractmethod
    def has_work(self) -> bool:
        """Return whether `poll_responses` has something to do now (False lets the rank sleep)."""

    def quiet_s(self) -> float:
        """Return for how many seconds `has_work` and `poll_kv` change only by a call, a message, or `wake`.

        Asked after `has_work` was False. The rank sleeps so long, or until a message comes; 0: it looks again
        within 1.2 ms.
        """
        return 0.0

    def cancel(self, ids: Iterable[int]) -> None:  # noqa: B027 - optional: a request then just runs to its end
        """Cancel requests in any state: each open one yields one more row, FINAL | CANCELLED, without tokens.

        Unknown ids and ended requests are ignored: their FINAL row may be on the way. So are context-only
        requests that `started` may have named: the receiver cancels them from `receive_kv` on, and
        `release_kv` frees them here.
        """

    # --- handoff of the KV cache (see roles/handoff.py): both sides, then the context side, then the
    # generation side ---

    def connect(self, mover: Mover, peers: dict[int, Peer]) -> None:
        """Set the mover, and the peers by instance; called before `load` on every rank with a handoff."""
        raise RuntimeError(f"core {self.config.core_type} has no KV cache to hand over, and takes none")

    def host_end(self) -> HostEnd:
        """Make the handoff's other end in this rank's memory, for a server whose partner is another run.

        Called on the instance's leader after `load`, if `connect` has named a single peer of one rank: this
        one.
        """
        raise RuntimeError(f"core {self.config.core_type} hands its KV caches over to its own run only")

    def lose_peer(self, instance: int) -> None:  # noqa: B027 - optional: not every core hands anything over
        """Go on without a partner of handoffs: what moves, or would, to or from it is done at once.

        `poll_kv` reports it, whether it has left or arrived or not. Called on every rank.
        """

    def poll_kv(self) -> list[int]:
        """Return the ids of requests whose whole KV cache has left this instance, or arrived.

        Polled on every rank.
        """
        return []

    def release_kv(self, request_id: int) -> None:
        """Free the KV cache of a request that `started` has named; on the generation side, an arrived one."""
        raise RuntimeError(f"core {self.config.core_type} has no KV cache to hand over")

    def started(self) -> list[int]:
        """Return the ids of context-only requests that got memory for their contexts since the last call.

        Called before each `poll_responses`. Each keeps its memory until `release_kv`. Requests of a single
        token are not named.
        """
        return []

    def send_kv(self, request_id: int, receiver: int, slot: int) -> None:
        """Send the KV cache of a request that `started` has named: what is computed now, the rest later.

        All ranks of instance `receiver` expect their pieces with tag ``Tag.KV + slot``. `poll_kv` reports
        when they have left.
        """
        raise RuntimeError(f"core {self.config.core_type} has no KV cache to hand over")

    def receive_kv(self, request: Batch, sender: int, slot: int) -> bool:
        """Reserve room for the KV cache of `request` (one row), and expect it from instance `sender`.

        Returns False while there is no room.
        """
        raise RuntimeError(f"core {self.config.core_type} takes no KV cache")

    def admit(self, request: Batch, first_token: int) -> None:
        """Continue `request`, whose KV cache has arrived, after `first_token`, as if by `enqueue`.

        `request`: a batch of one row with its prompt. Only a FINAL row follows; its first token is
        `first_token`.
        """
        raise RuntimeError(f"core {self.config.core_type} takes no KV cache")


def short_requests(n: int, n_prompt: int = 8, max_output: int = 4, min_output: int = 0) -> Batch:
    """Return `n` equal greedy requests, for a warm-up. `n_prompt`: tokens of each prompt."""
    rows = np.zeros(n, REQUEST)
    rows["id"] = np.arange(n)
    rows["n_tokens"] = n_prompt
    rows["max_output"], rows["min_output"] = max_output, min_output
    rows["top_p"] = 1
    rows["generation"] = NO_INSTANCE
    return Batch(rows, np.full(n * n_prompt, 3, np.int32))
