"""Adapter for `llmlib` cores on ranks: an `mpillm.cores` core with a server of this instance's cores."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from disagg.errors import ConfigError, about
from mpillm.comms.messages import Batch, RequestFlag, ResponseFlag
from mpillm.cores.base import CoreConfig, Credits, LLMCore
from mpillm.cores.clients import Answers
from mpillm.llmlib.cores.base import LLMRequest
from mpillm.llmlib.factory import LLMServerFactory, n_cores
from mpillm.llmlib.server import LLMServer
from mpillm.options.mitten import Configuration, in_force

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.llmlib.cores.base import LLMCore as Backend
    from mpillm.options.run_config import RunConfig

# These cores have their own queues.
_CREDITS = Credits(requests=1 << 20, tokens=1 << 40)
_DECLARED = ("uses_gpus", "needs_model", "engine_stages", "servers", "framework", "packages")


class RankCore(LLMCore):
    """Base of the classes of `rank_core`. In an instance of several ranks, the root rank has the cores."""

    # The interface has no options of one request.
    samples_each = False
    lengths_each = False

    backend: ClassVar[type[Backend]]
    backend_kwargs: ClassVar[dict[str, Any]]  # from a harness operation; --core_options override them

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        super().__init__(config, comms)
        self._server: LLMServer | None = None
        self._answers = Answers()
        self._with_first_token: set[int] = set()  # requests with a reported first token

    @classmethod
    def settings(cls, config: RunConfig) -> Configuration:
        """Return the run's values, the active configuration while the backend's cores are created."""
        return in_force(config)

    @classmethod
    def check(cls, config: CoreConfig) -> None:
        """Raise ConfigError for stop words that a request cannot have, or fewer cores than instances."""
        _check_stop_words(config.engine.stop_words)
        with config.settings.autoapply():
            n = n_cores(cls.backend, {**cls.backend_kwargs, **config.options})
        if n < config.n_instances:
            raise ConfigError(
                f"{cls.backend.__name__}.get_num_cores_for_workload() gave {n}, but this run has"
                f" {config.n_instances} instances, which need a core each: start fewer ranks"
            )

    # --- life ---

    def load(self) -> None:
        if self.config.engine.tp_rank == self.config.engine.pp_rank == 0:
            with self.config.settings.autoapply():
                self._server = self._make_server()

    def _make_server(self) -> LLMServer:
        options = {**self.backend_kwargs, **self.config.options}
        own_indices = range(self.config.instance, n_cores(self.backend, options), self.config.n_instances)
        return LLMServerFactory.create_server(
            self.backend,
            disable_progress_display=True,
            complete_callback=self._complete,
            core_indices=own_indices,
            **options,
        )

    def run_health_check(self) -> None:
        if self._server is not None:
            self._server.warmup_manager.run_health_checks(self._server.cores)

    def warm_up_requests(self) -> Batch:
        """Run the cores' own warm-up. The returned requests then warm up the path of the test's requests."""
        self.server.warm_up()
        return super().warm_up_requests()

    def flush(self) -> None:
        if self._server is not None:
            self._server.flush_queries()

    def notify_stop(self) -> None:
        if self._server is not None:
            self._server.abandon()
            self._server = None

    @property
    def server(self) -> LLMServer:
        if self._server is None:
            raise RuntimeError(
                f"{self.backend.__name__} is not loaded, or this rank does not lead its instance"
            )
        return self._server

    # --- work ---

    def credits(self) -> Credits:
        return _CREDITS

    def enqueue(self, requests: Batch) -> None:
        offsets = requests.offsets().tolist()
        stop = next((list(word) for word in self.config.engine.stop_words if not isinstance(word, str)), None)
        self.server.issue_queries(
            [
                LLMRequest(
                    int(row["id"]),
                    requests.tokens[start:end].tolist(),
                    None if row["flags"] & RequestFlag.IGNORE_STOP else stop,
                )
                for row, start, end in zip(requests.rows, offsets, offsets[1:], strict=False)
            ]
        )

    def has_work(self) -> bool:
        return bool(self._answers) or (
            self._server is not None and any(core.error for core in self._server.cores)
        )

    def poll_responses(self) -> Batch | None:
        for core in self.server.cores:
            core.check()
        return self._answers.take()

    def _complete(self, request_id: int, output_tokens: list[int], is_first_token: bool) -> None:
        """Store a response. Each core calls this from its own thread."""
        if is_first_token:
            self._with_first_token.add(request_id)
            self._answers.add(request_id, ResponseFlag.FIRST, output_tokens[:1])
            return
        flags = (
            ResponseFlag.FINAL
            if request_id in self._with_first_token
            else ResponseFlag.FIRST | ResponseFlag.FINAL
        )
        self._with_first_token.discard(request_id)
        self._answers.add(request_id, flags, output_tokens)


def _check_stop_words(words: Sequence[str | Sequence[int]]) -> None:
    """Raise ConfigError for stop words that do not fit `LLMRequest.stop_tokens`."""
    with about("stop_words"):
        for word in words:
            if isinstance(word, str):
                raise ConfigError(
                    f"--stop_words {word!r}: a request of llmlib has tokens, not text; give the word as an"
                    " array of token ids"
                )
        if len(words) > 1:
            raise ConfigError(
                f"--stop_words: {len(words)} words, but a request of llmlib has one (stop_tokens); give one"
            )


@cache
def rank_core(backend: type[Backend]) -> type[RankCore]:
    """Return a core class that runs `backend`, with `backend`'s declarations."""
    if inspect.isabstract(backend):
        lacking = ", ".join(sorted(backend.__abstractmethods__))
        raise ConfigError(f"{backend.__module__}:{backend.__qualname__} lacks {lacking}")
    declared = {name: getattr(backend, name) for name in _DECLARED if hasattr(backend, name)}
    return type(
        backend.__name__,
        (RankCore,),
        {"backend": backend, "backend_kwargs": {}, "__doc__": backend.__doc__, **declared},
    )
