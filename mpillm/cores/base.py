"""LLMCore: the methods that a run needs of a backend. `capabilities` has the optional ones.

One core runs on every rank of an instance; only the root rank's core receives requests. The rank's event loop
drives a core, which never waits. `enqueue` accepts a batch. `poll_responses` does a bounded piece of work
(one engine step, one poll of a socket) and returns the responses that are ready.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from disagg.errors import ConfigError, about, nearest
from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch
from mpillm.devices import Gpu, visible_gpus
from mpillm.engine.shape.engine_config import EngineConfig

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.options.run_config import RunConfig


@dataclass(frozen=True)
class ClientConfig:
    """The server that a client core uses."""

    server: int | None = None  # index among the servers that the run starts; None: a server outside the run
    names_model: bool = False  # the run gives the server the model's name: see `ServerKind`
    sends_text: bool = False  # the server tokenizes: the tokens of a prompt are the UTF-8 bytes of its text
    server_wait_s: float | None = None  # for the start of a server outside the run; None: --load_deadline
    first_token_wait_s: float | None = None  # for a server that is up; None: a share of --health_deadline
    index: int = 0  # among the clients of this server
    n_clients: int = 1  # of this server
    restarts: bool = False  # the run starts the server again if it fails in the test
    context_servers: tuple[int, ...] = ()  # indices of the run's context servers, for a generation server
    profiler_stop_s: float | None = None  # profile the servers in the test; longest wait for the traces
    protocol: str = ""  # between context and generation servers: see `cores.openai_client.disagg_protocol`


@dataclass(frozen=True)
class CoreConfig:
    """All inputs of a core: plain data, equal on all ranks of an instance except for each rank's place."""

    core_type: str
    engine: EngineConfig = field(default_factory=EngineConfig)
    rank: int = 0  # in the world, for messages
    n_instances: int = 1  # of this role
    serves: bool = False  # requests come from HTTP clients: each may fail alone, and latency matters
    client: ClientConfig = ClientConfig()  # for a core whose model is in a server
    settings: Any = None  # what `LLMCore.settings` returned
    resets_prefix_cache: bool = False  # `start_test` empties the prefix cache

    @property
    def role(self) -> str:
        """The instance's role: executor, context or generation."""
        return self.engine.role

    @property
    def instance(self) -> int:
        """The instance's index."""
        return self.engine.instance

    @property
    def options(self) -> dict[str, Any]:
        """--core_options."""
        return self.engine.core_options


class Credits(NamedTuple):
    """The capacity of an instance, including requests that wait in the core."""

    requests: int
    tokens: int  # KV cache, in tokens


class Metrics(NamedTuple):
    """The tokens that a core has computed since `start_test`, and its current state."""

    # Tokens that are computed again after a preemption count again. Tokens saved by block reuse don't count.
    prompt_tokens: int
    generated_tokens: int
    running: int  # requests
    waiting: int  # requests
    kv_cache_usage: float | None = None  # share of used blocks, 0 to 1; None: no KV cache


class ModelLimits(Protocol):
    """A model's limits, for the harness."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def max_prompt_len(self) -> int | None: ...


class NumericLimits(NamedTuple):
    """`ModelLimits` as numbers. The defaults limit nothing."""

    vocab_size: int = 1 << 31
    max_seq_len: int = 1 << 31
    max_prompt_len: int | None = None


class LLMCore(ABC):
    """A backend. An error from any method ends the run on all ranks, with a message that names this rank.

    Abstract methods are required, the others have defaults. `capabilities` has optional features.
    """

    # Properties that commands need before a core exists.
    uses_gpus: ClassVar[bool] = False  # each rank takes a GPU where there is one
    # Computes a model in this process: needs --model_path, and supports the precisions of our options.
    needs_model: ClassVar[bool] = False
    # A client of servers elsewhere: each worker rank is an executor, whatever the servers' layout.
    is_client: ClassVar[bool] = False
    # A client whose servers accept prompts as text, without a tokenizer here.
    takes_text: ClassVar[bool] = False
    # Follows the sampling options of each request, which may be other ones than the run's.
    samples_each: ClassVar[bool] = True
    # Ends each answer at the request's own maximum of tokens, which may be less than --max_output_len.
    lengths_each: ClassVar[bool] = True
    # Answers requests with `logprobs` with LOGPROBS rows.
    gives_logprobs: ClassVar[bool] = False
    # Answers all requests with the flag PROMPT_COUNTS with their cached tokens.
    reports_reuse: ClassVar[bool] = False
    # Supports --speculative_config.
    speculates: ClassVar[bool] = False
    # Supports --enable_max_num_tokens_tuning.
    tunes_steps: ClassVar[bool] = False
    # ``module:function``, which converts a RunConfig to the last stage of `generate-engines`.
    engine_stages: ClassVar[str | None] = None
    # ``module:function``, which converts a RunConfig and the arguments of `run-llm-server` to its servers.
    servers: ClassVar[str | None] = None
    # ``module:function``, which converts a RunConfig and its disaggregation YAML to the YAML that the core's
    # servers read. None: the same YAML.
    disagg_yaml: ClassVar[str | None] = None
    # A package whose import is collective over MPI.COMM_WORLD: every rank imports it in phase load.
    world_import: ClassVar[str | None] = None
    framework: ClassVar[str | None] = None  # for the system description of a submission
    imports: ClassVar[tuple[str, ...]] = ()  # required packages, imported in `load`
    packages: ClassVar[tuple[str, ...]] = ()  # packages to list with versions; the framework's first

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        """Create the core; `load` opens weights and sockets. `comms`: None if the instance has one rank."""
        self.config = config
        self.comms = comms
        self.streams = True
        """Whether an answer's first token is reported when it arrives, or only with the complete answer."""
        self.awaits = ""
        """The cause of a wait in `load`, in a few words. Any thread may set it."""
        self.wake: Callable[[], None] = lambda: None
        """Wakes the rank, which then looks at `has_work`. Any thread may call it. Set before `load`."""
        self.check_run: Callable[[], None] = lambda: None
        """Raises the error that ends the run, if there is one. Set before `load`.

        `load`, `run_health_check` and `statistics` call it every quarter of a second while they wait.
        """
        self.server_log: Callable[[int], Path | None] = lambda index: None
        """Returns the log of a server of the run, by its index. The run sets it before `load`."""

    @classmethod
    def settings(cls, config: RunConfig) -> Any:
        """Return `CoreConfig.settings`: options of the run that only this core needs.

        Called on the ranks that check or create a core. Raises ConfigError for a wrong option.
        """
        return None

    @classmethod
    def check(cls, config: CoreConfig) -> ModelLimits | None:
        """Check `config` before any rank loads (ConfigError); return the model's limits, if it has one."""
        return None

    @classmethod
    def gpus(cls) -> tuple[Gpu, ...]:
        """Return the GPUs of this node for ranks of this core, as this process numbers them."""
        return (visible_gpus() or ()) if cls.uses_gpus else ()

    # --- life ---

    @abstractmethod
    def load(self) -> None:
        """Load weights, or start or connect to a server. May take minutes, within the load deadline."""

    def doing(self) -> str:
        """Return the progress of `load` or of the warm-up, or the cause of a wait, in words; "": unknown.

        The console shows it while the user waits. Another thread calls this, twice a second.
        """
        return self.awaits

    @abstractmethod
    def run_health_check(self) -> None:
        """Prove that the backend answers; raise if it does not.

        Called on every rank of an instance. On other ranks than the root rank, it returns immediately; these
        cores take part by being polled.
        """

    def warm_up_requests(self) -> Batch:
        """Return the requests that warm this instance up before `ready`: by default two short greedy ones."""
        return short_requests(2, min_output=4)

    def start_test(self) -> None:  # noqa: B027 - optional: not every core counts
        """Reset counters of requests: the warm-up is over, and nothing is in flight.

        With `CoreConfig.resets_prefix_cache`, also empty the prefix cache.
        """

    def statistics(self) -> dict[str, Any]:
        """Return further counts of the test for `result.json`, such as preemptions."""
        return {}

    def metrics(self) -> Metrics | None:
        """Return the counts so far, including unfinished answers; None if the core does not count.

        Called on the instance's root rank twice a second, between polls, so it must not wait.
        """
        return None

    def flush(self) -> None:  # noqa: B027 - optional: most cores delay nothing
        """Send all delayed data: no more requests will come."""

    def notify_stop(self) -> None:  # noqa: B027 - optional: not every core owns something to stop
        """Release servers, threads and memory. Called once, also after an error."""

    # --- work ---

    @abstractmethod
    def credits(self) -> Credits:
        """Return the instance's capacity; called once, after `load`."""

    @abstractmethod
    def enqueue(self, requests: Batch) -> None:
        """Accept requests (REQUEST rows). A request with `generation` set stops after its first token."""

    @abstractmethod
    def poll_responses(self) -> Batch | None:
        """Do a bounded piece of work; return RESPONSE rows that became ready, or None.

        Each request yields a FIRST row and a FINAL row, or one row with both flags. A context-only request
        yields only FIRST (FIRST | FINAL if the first token ends the answer). A request with STREAM also
        yields PARTIAL rows between the two, if the core can; FINAL always has the complete answer.
        """

    @abstractmethod
    def has_work(self) -> bool:
        """Return whether `poll_responses` has work now. If not, the rank may sleep."""

    def quiet_s(self) -> float:
        """Return the seconds for which only a call, a message or `wake` can change `has_work` and `poll_kv`.

        Called after `has_work` was False. The rank then sleeps for this time, or until a message arrives.
        With 0, it polls again within 1.2 ms.
        """
        return 0.0

    def cancel(self, ids: Iterable[int]) -> None:  # noqa: B027 - optional: a request then just runs to its end
        """Cancel requests in any state: each open request yields a row FINAL | CANCELLED without tokens.

        Unknown ids and ended requests are ignored: their FINAL row may be on the way.
        """


@about("core_options")
def check_option_names(options: Iterable[str], known: Collection[str], core: str = "this core") -> None:
    """Raise ConfigError for --core_options that the core does not have."""
    for name in options:
        if name not in known:
            hint = f"{nearest(name, known)}; it has: {', '.join(known)}"
            raise ConfigError(f"--core_options {name}: {core} has no such option{hint}")


def short_requests(n: int, n_prompt: int = 8, max_output: int = 4, min_output: int = 0) -> Batch:
    """Return `n` equal greedy requests, for a warm-up. `n_prompt`: tokens of each prompt."""
    rows = np.zeros(n, REQUEST)
    rows["id"] = np.arange(n)
    rows["n_tokens"] = n_prompt
    rows["max_output"], rows["min_output"] = max_output, min_output
    rows["top_p"] = 1
    rows["generation"] = NO_INSTANCE
    return Batch(rows, np.full(n * n_prompt, 3, np.int32))
