"""`tensorrt_llm.bindings.executor`, and C++'s session."""

from __future__ import annotations

import enum
import json
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any

from mpi4py import MPI

from .record import RECORD, REFUSED, Bound, answer, bound

_session: MPI.Intracomm | None = None


def _bindings() -> ModuleType:
    """Make tensorrt_llm.bindings.executor: a class for each that is recorded, and nothing else."""
    module = ModuleType("tensorrt_llm.bindings.executor")
    for name, spec in RECORD["bindings"].items():
        if "members" in spec:
            setattr(module, name, enum.Enum(name, spec["members"]))
        elif name != "MpiComm":
            setattr(module, name, MADE.get(name) or type(name, (Bound,), {"_name": name}))
    return module


class Executor(Bound):
    """Works a step at each look for responses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = json.loads((Path(self._values["model_path"]) / "config.json").read_text())
        mapping, parallel = (
            config["pretrained_config"]["mapping"],
            self._values["executor_config"].parallel_config,
        )
        self._orchestrates = parallel.communication_mode.name == "ORCHESTRATOR"
        self._comm = MPI.COMM_SELF if _session is None or self._orchestrates else _session
        ranks = mapping.get("tp_size", 1) * mapping.get("pp_size", 1)
        if not self._orchestrates and self._comm.size != ranks:
            raise RuntimeError(f"the engine has {ranks} ranks, the session {self._comm.size}")
        if parallel.device_ids is not None and len(parallel.device_ids) != ranks:
            raise RuntimeError(
                f"the engine has {ranks} ranks, and there are {len(parallel.device_ids)} device_ids"
            )
        self._batch = self._values["executor_config"].max_batch_size
        self._next = 1000
        self._open: dict[int, tuple[Any, list[int]]] = {}
        self._cancelled: set[int] = set()
        self._ready: deque[Any] = deque()
        self._steps: list[Any] = []
        self._comm.Barrier()

    def can_enqueue_requests(self) -> bool:
        return self._comm.rank == 0

    def enqueue_requests(self, requests: list[Any]) -> list[int]:
        assert self._comm.rank == 0, "only the leader takes requests"
        ids = list(range(self._next, self._next + len(requests)))
        self._next += len(requests)
        for id_, request in zip(ids, requests, strict=True):
            values = request._values
            least = values["sampling_config"]._values.get("min_tokens") or 1
            rest = answer(
                values["input_token_ids"],
                values["max_tokens"],
                values["end_id"],
                least,
                values["stop_words"] or [],
            )
            if not values["output_config"].exclude_input_from_output:
                rest = values["input_token_ids"] + rest
            self._open[id_] = request, rest
        return ids

    def get_num_responses_ready(self, id: int | None = None) -> int:
        if not self._ready:
            self._step()
        return len(self._ready)

    def await_responses(self, timeout: Any) -> list[Any]:
        assert timeout.total_seconds() == 0, "the event loop must not wait"
        ready, self._ready = [*self._ready], deque()
        return ready

    def cancel_request(self, id: int) -> None:
        self._cancelled.add(id)

    def get_latest_iteration_stats(self) -> list[Any]:
        steps, self._steps = self._steps, []
        return steps

    def shutdown(self) -> None:
        self._comm.Barrier()

    def _step(self) -> None:
        running = [*self._open][: self._batch]
        begun = [id_ for id_ in running if not getattr(self._open[id_][0], "_begun", False)]
        if running:
            self._note(running, begun)
        for id_ in running:
            request, rest = self._open[id_]
            request._begun = True
            n = 1 if request.streaming else len(rest)
            last = id_ in self._cancelled or n >= len(rest)
            self._ready.append(self._response(id_, request, [] if id_ in self._cancelled else rest[:n], last))
            del rest[:n]
            if last:
                del self._open[id_]

    def _response(self, id_: int, request: Any, tokens: list[int], last: bool) -> Any:
        if request.input_token_ids[0] == REFUSED:
            return EXECUTOR.Response(id_, error_msg="a prompt that this engine refuses")
        result = EXECUTOR.Result()
        result.output_token_ids, result.is_final = [tokens], last
        return _Response(id_, result=result)

    def _note(self, running: list[int], begun: list[int]) -> None:
        step = EXECUTOR.IterationStats()
        step.num_active_requests, step.num_queued_requests = len(running), len(self._open) - len(running)
        step.inflight_batching_stats, step.kv_cache_stats = (
            EXECUTOR.InflightBatchingStats(),
            EXECUTOR.KvCacheStats(),
        )
        streamed = all(self._open[id_][0].streaming for id_ in running)
        step.inflight_batching_stats.num_ctx_tokens = sum(
            len(self._open[id_][0].input_token_ids) for id_ in begun
        )
        step.inflight_batching_stats.num_gen_requests = (
            len(running) - len(begun) if streamed else sum(len(self._open[id_][1]) - 1 for id_ in running)
        )
        step.kv_cache_stats.max_num_blocks, step.kv_cache_stats.used_num_blocks = (
            2 * self._batch,
            len(running),
        )
        self._steps.append(step)


class _Response(Bound):
    _name = "Response"

    def has_error(self) -> bool:
        return self._values.get("error_msg") is not None


class MpiComm:
    """Stands for C++'s session."""

    @staticmethod
    def set_raw_mpi_session_by_fortran_handle(*args: Any) -> None:
        global _session
        name = "set_raw_mpi_session_by_fortran_handle"
        (handle,) = bound(name, RECORD["bindings"]["MpiComm"]["methods"][name], args, {}).values()
        comm = MPI.Comm.f2py(handle)
        assert isinstance(comm, MPI.Intracomm)
        _session = comm


MADE = {"Executor": Executor, "Response": _Response}
EXECUTOR = _bindings()
