"""The LLM API: `LLM`, its session, its configurations."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mpi4py import MPI

from .record import RECORD, REFUSED, Fields, answer, bound, called, fields

_comm: MPI.Intracomm | None = None
CONFIGS: dict[str, type[Fields]] = {
    name: type(name, (Fields,), {})
    for name in (
        "KvCacheConfig",
        "SchedulerConfig",
        "CudaGraphConfig",
        "ExtendedRuntimePerfKnobConfig",
        "CacheTransceiverConfig",
    )
}


def set_mpi_comm(*args: Any, **kwargs: Any) -> None:
    global _comm
    _comm = bound("set_mpi_comm", [RECORD["python"]["set_mpi_comm"]["parameters"]], args, kwargs)["new_comm"]


def part_of_model(n_ranks: int) -> int:
    """Check, on each rank of a session, that its worker got a communicator by `set_mpi_comm`."""
    assert _comm is not None and _comm.size == n_ranks
    return _comm.rank


class MpiCommSession:
    """Does as TensorRT-LLM's: rank 0's work in a thread, the others' through mpi4py."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = called("MpiCommSession", "__init__", args, kwargs)
        self.comm, self.n_workers = values["comm"], values.get("n_workers", 1)
        if self.comm.rank != 0:
            raise RuntimeError(f"only rank 0 can start multi-node session, got {self.comm.rank}")
        if self.comm.size != self.n_workers:
            raise ValueError(
                f"n_workers must be equal to the number of processes in MPI, got {self.n_workers}"
            )
        from mpi4py.futures import MPICommExecutor

        self._mine = ThreadPoolExecutor(1)
        self._pool: Any = MPICommExecutor(self.comm).__enter__() if self.comm.size > 1 else None

    def submit(self, task: Any, *args: Any) -> list[Future[Any]]:
        others = [self._pool.submit(task, *args) for _ in range(self.n_workers - 1)] if self._pool else []
        return [self._mine.submit(task, *args), *others]

    def shutdown(self, wait: bool = True) -> None:
        for pool in filter(None, (self._pool, self._mine)):
            pool.shutdown(wait=wait)


class SamplingParams(Fields):
    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValueError as error:
            raise TypeError(str(error)) from error


class LLM:
    """Stands for the PyTorch backend's class."""

    _arguments = "TorchLlmArgs"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = called("BaseLLM", "__init__", args, kwargs)
        allowed = {field.rstrip("=") for field in fields(self._arguments)} | {"_mpi_session", "backend"}
        for name in values:
            if name not in allowed:
                raise ValueError(f"{type(self).__name__} got invalid argument: {name}")
        assert isinstance(values["kv_cache_config"], CONFIGS["KvCacheConfig"])
        assert isinstance(values["scheduler_config"], CONFIGS["SchedulerConfig"])
        for policy, kind in (
            ("capacity_scheduler_policy", "CapacitySchedulerPolicy"),
            ("context_chunking_policy", "ContextChunkingPolicy"),
        ):
            setting = getattr(values["scheduler_config"], policy, None)
            assert setting is None or setting in RECORD["bindings"][kind]["members"]
        self._session = values["_mpi_session"]
        n_ranks = values["tensor_parallel_size"] * values["pipeline_parallel_size"]
        assert self._session.n_workers == n_ranks
        ranks = [future.result(60) for future in self._session.submit(part_of_model, n_ranks)]
        assert sorted(ranks) == list(range(n_ranks)), ranks
        self._open = 0

    def generate_async(self, *args: Any, **kwargs: Any) -> Any:
        return _Result(self, **called("BaseLLM", "generate_async", args, kwargs))

    async def _stats(self) -> Any:
        yield {
            "numActiveRequests": self._open,
            "numQueuedRequests": 0,
            "kvCacheStats": {"usedNumBlocks": self._open, "maxNumBlocks": 64},
        }

    def get_stats_async(self, *args: Any, **kwargs: Any) -> Any:
        called("BaseLLM", "get_stats_async", args, kwargs)
        return self._stats()

    def shutdown(self) -> None:
        self._session.shutdown()


class TrtLLM(LLM):
    _arguments = "TrtLlmArgs"


class _Output:
    token_ids: list[int]

    def __init__(self) -> None:
        self.token_ids = []


class _Result:
    """Stands for `GenerationResult`, awaited in the loop where it was asked for."""

    def __init__(self, llm: LLM, inputs: list[int], sampling_params: Any, streaming: bool = False) -> None:
        import asyncio

        asyncio.get_running_loop()
        self._llm, self._streaming, self._aborted = llm, streaming, False
        self.finished, self.outputs = False, [_Output()]
        if inputs[0] == REFUSED:
            raise RuntimeError("a prompt that this model refuses")
        stops = [[token] for token in sampling_params.stop_token_ids or []]
        least = getattr(sampling_params, "min_tokens", 1)
        self._rest = answer(inputs, sampling_params.max_tokens, sampling_params.end_id, least, stops)
        llm._open += 1

    def abort(self) -> None:
        self._aborted = True

    def __aiter__(self) -> _Result:
        return self

    async def __anext__(self) -> _Result:
        import asyncio

        if self.finished:
            raise StopAsyncIteration
        await asyncio.sleep(0)
        n = 1 if self._streaming else len(self._rest)
        self.outputs[0].token_ids = [*self.outputs[0].token_ids, *self._rest[:n]]
        del self._rest[:n]
        self.finished = self._aborted or not self._rest
        self._llm._open -= self.finished
        return self
