"""mpillm's cores as cores of `LLMServer`: one process, without ranks.

`LLMHarnessOp` runs them on ranks without this adapter (`BuiltInCore.rank_core`).
"""

from __future__ import annotations

import datetime
import importlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, ClassVar

import numpy as np

import disagg
from disagg.errors import ConfigError
from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch, RequestFlag, ResponseFlag
from mpillm.cores import base as ranks
from mpillm.cores.registry import BackendRegistry
from mpillm.devices import assign
from mpillm.llmlib.command_line import command_line
from mpillm.llmlib.cores.base import CompleteCallback, LLMCore, LLMRequest, LLMResponse
from mpillm.llmlib.utils import LLMServerProgressDisplay
from mpillm.options.disagg_yaml import disagg_config
from mpillm.options.fields import AllFields
from mpillm.options.mitten import applied
from mpillm.options.options import parse_run
from mpillm.options.run_config import RunConfig
from mpillm.runtime.core_configs import core_configs, with_settings


class BuiltInCore(LLMCore):
    """Adapter for a core of `mpillm.cores`; the response thread replaces a rank's event loop."""

    rank_core = "mpillm.llmlib.cores.built_in:core_of_ranks"
    core_type: ClassVar[str]

    def __init__(self, core: ranks.LLMCore, seed: int, **values: Any) -> None:
        """`core`: loaded here, which may take minutes. `seed`: for the first request."""
        super().__init__(**values)
        self._core = core
        self._seed = seed
        self._n_requests = 0
        self._waiting: deque[tuple[int, LLMRequest]] = deque()
        self._sizes: dict[int, int] = {}  # maximum tokens of each request in the core
        self._with_first_token: set[int] = set()  # requests in the core with a delivered first token
        self._core_lock = threading.Lock()  # the core is not thread-safe
        self._wakeup = threading.Event()
        core.wake = self._wakeup.set
        core.load()
        self._credits = core.credits()

    # --- the contract ---

    def _enqueue_impl(self, queries: list[LLMRequest]) -> list[int]:
        ids = [(self._n_requests + i) & 0xFFFFFFFF for i in range(len(queries))]
        self._n_requests += len(queries)
        self._waiting.extend(zip(ids, queries, strict=True))
        self._wakeup.set()
        return ids

    def _poll_responses_impl(self, timeout: datetime.timedelta) -> Iterable[LLMResponse]:
        until = time.monotonic() + timeout.total_seconds()
        while True:
            self._wakeup.clear()
            with self._core_lock:
                self._submit()
                batch = self._core.poll_responses() if self._core.has_work() else None
            if batch is not None and (responses := [*self._responses(batch)]):
                return responses
            if (left := until - time.monotonic()) <= 0:
                return []
            if batch is None:
                self._wakeup.wait(left)

    def _submit(self) -> None:
        """Enqueue waiting requests as far as the core has credits."""
        gen = self.harness_config.gen_config
        assert gen is not None  # set by `with_generation`
        rows, tokens = [], []
        while self._waiting and len(self._sizes) < self._credits.requests:
            id_, query = self._waiting[0]
            size = len(query.input_tokens) + gen.max_output_len
            if self._sizes and sum(self._sizes.values()) + size > self._credits.tokens:
                break
            self._waiting.popleft()
            self._sizes[id_] = size
            flags = 0 if query.stop_tokens else RequestFlag.IGNORE_STOP
            seed = (self._seed + id_) & 0xFFFFFFFF
            sampling = (gen.max_output_len, gen.min_output_len, gen.temperature, gen.top_k, gen.top_p, seed)
            of_conversation = 0, 0  # no session, no salt
            rows.append((id_, len(query.input_tokens), *sampling, flags, NO_INSTANCE, 0, *of_conversation))
            tokens.append(np.array(query.input_tokens, np.int32))
        if rows:
            self._core.enqueue(Batch(np.array(rows, REQUEST), np.concatenate(tokens)))

    def _responses(self, batch: Batch) -> Iterator[LLMResponse]:
        offsets = batch.offsets().tolist()
        for row, start, end in zip(batch.rows, offsets, offsets[1:], strict=False):
            id_, answer = int(row["id"]), batch.tokens[start:end].tolist()
            request = self._open.get(id_)  # None: dropped
            if row["flags"] & ResponseFlag.ERROR and request is not None:
                raise RuntimeError(f"request {request.request_id} has failed; the log has the reason")
            if row["flags"] & ResponseFlag.FINAL:
                del self._sizes[id_]
                has_first = id_ in self._with_first_token
                self._with_first_token.discard(id_)
                yield LLMResponse(id_, [answer[1:] if has_first else answer], True)
            elif row["flags"] & ResponseFlag.FIRST and self._streaming:
                self._with_first_token.add(id_)
                yield LLMResponse(id_, [answer], False)

    def run_health_check(self) -> None:
        with self._core_lock:
            self._core.run_health_check()

    def _cleanup_resources(self) -> None:
        with self._core_lock:
            self._core.notify_stop()

    @classmethod
    def get_num_cores_for_workload(cls, **kwargs: Any) -> int:
        """Return 1: a client uses all of its servers, and an engine its GPU."""
        return 1

    @classmethod
    def get_config_for_core(
        cls,
        core_index: int,
        complete_callback: CompleteCallback,
        progress_display: LLMServerProgressDisplay,
        verbose: bool,
        verbose_nvtx: bool,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of `__init__`. `kwargs`: values of fields, by name."""
        config = parse_run(command_line({**kwargs, "core_type": cls.core_type}))
        with applied(config):
            return {
                "core": _core(config),
                "seed": config.seed,
                "name": f"{cls.core_type}-{core_index}",
                "complete_callback": complete_callback,
                "harness_config": cls.CONFIG_T(),
                "progress_display": progress_display,
                "verbose": verbose,
                "verbose_nvtx": verbose_nvtx,
            }


def _core(config: RunConfig) -> ranks.LLMCore:
    """Create the core of a run with one rank. Raises ConfigError if it needs several."""
    kind = BackendRegistry.get(config.core_type)
    n_ranks = disagg.ranks_for(1, config.control_ranks)
    sizes = (AllFields.tensor_parallelism, AllFields.pipeline_parallelism)
    several = [field.name for field in sizes if not kind.is_client and (config[field] or 1) > 1]
    if several or (config.mode == "disaggregated" and not kind.is_client):
        option = config.named(several[0] if several else "mode")
        raise ConfigError(f"{option}: LLMServer runs a core in one process; use LLMHarnessOp under mpirun")
    plan = disagg.plan(disagg_config(config, n_ranks, kind.is_client), n_ranks, None, 0)
    (instance,) = plan.instances
    gpus = assign(config.device, plan, [kind.gpus()] * n_ranks) if kind.uses_gpus else {}
    (own,) = with_settings(config, plan, core_configs(config, plan, [instance.root_rank], gpus))
    if kind.world_import:
        importlib.import_module(kind.world_import)
    kind.check(own)
    return kind(own)


def core_of_ranks(backend: type[BuiltInCore]) -> type[ranks.LLMCore]:
    """Return the core class for ranks."""
    return BackendRegistry.get(backend.core_type)


@cache
def built_in(name: str) -> type[BuiltInCore]:
    """Return the class for `LLMServer` of a core in `BackendRegistry`."""
    core = BackendRegistry.get(name)
    return type(core.__name__, (BuiltInCore,), {"core_type": name, "__doc__": core.__doc__})
