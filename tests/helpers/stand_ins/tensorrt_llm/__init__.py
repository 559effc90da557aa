"""A stand-in for TensorRT-LLM, made from the record of its interface in tests/data/trtllm.

It refuses what the record does not have: a name, a keyword, a missing argument, an enum's member. Its models
answer a prompt with the prompt backwards; a prompt that begins with REFUSED gets an error. As the real
package's, its import is collective over MPI.COMM_WORLD.
"""

from __future__ import annotations

import enum
import json
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from mpi4py import MPI

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "data/trtllm/record.json").read_text(encoding="utf-8")
)
REFUSED = 666
_BLOCK = 32  # tokens

__version__ = RECORD["version"]

_session: MPI.Intracomm | None = None  # C++'s
_comm: MPI.Intracomm | None = None  # Python's
if MPI.Is_initialized():
    MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Free()


# --- what the record allows ---


def bound(
    name: str, overloads: list[list[str]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments by name, of the first overload that takes them; TypeError if none does."""
    for parameters in overloads:
        names = [one.rstrip("=") for one in parameters if one not in ("*", "**")]
        first_keyword = parameters.index("*") if "*" in parameters else len(names)
        values = dict(zip(names[:first_keyword], args, strict=False))
        required = {one for one in parameters if one not in ("*", "**") and not one.endswith("=")}
        known = kwargs.keys() <= {*names} or "**" in parameters
        if (
            len(args) <= first_keyword
            and known
            and not values.keys() & kwargs.keys()
            and required <= values.keys() | kwargs.keys()
        ):
            return values | kwargs
    raise TypeError(
        f"{name}(): incompatible arguments ({len(args)} by position; {', '.join(kwargs)}): takes {overloads}"
    )


class Bound:
    """A class of the bindings: attributes and calls as recorded."""

    _name = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        spec = RECORD["bindings"][self._name]
        self._attributes = {*spec["attributes"]}
        self._values = bound(self._name, spec["init"], args, kwargs)

    def __init_subclass__(cls) -> None:
        cls._name = cls._name or cls.__name__
        for name, overloads in RECORD["bindings"][cls._name]["methods"].items():
            if (made := cls.__dict__.get(name)) is not None:
                setattr(cls, name, _checked(f"{cls._name}.{name}", overloads, made))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._attributes:
            return self._values.get(name)
        raise AttributeError(f"'{self._name}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self._attributes:
            self._values[name] = value
        else:
            raise AttributeError(f"'{self._name}' object has no attribute '{name}'")


def _checked(name: str, overloads: list[list[str]], method: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, **bound(name, overloads, args, kwargs))

    return call


def _bindings() -> ModuleType:
    """tensorrt_llm.bindings.executor: a class for each that is recorded, and nothing else."""
    module = ModuleType("tensorrt_llm.bindings.executor")
    for name, spec in RECORD["bindings"].items():
        if "members" in spec:
            setattr(module, name, enum.Enum(name, spec["members"]))
        elif name != "MpiComm":
            setattr(module, name, MADE.get(name) or type(name, (Bound,), {"_name": name}))
    return module


class Fields:
    """A configuration of the LLM API (pydantic's): fields of the record, others are refused."""

    def __init__(self, **values: Any) -> None:
        if unknown := values.keys() - {field.rstrip("=") for field in fields(type(self).__name__)}:
            raise ValueError(
                f"{type(self).__name__}: Extra inputs are not permitted: {', '.join(sorted(unknown))}"
            )
        self.__dict__.update(values)


def fields(name: str) -> list[str]:
    """Those of its bases included."""
    spec = RECORD["python"].get(name)
    return (
        []
        if spec is None
        else [*spec["fields"], *(field for base in spec["bases"] for field in fields(base))]
    )


def called(name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return bound(f"{name}.{method}", [RECORD["python"][name]["methods"][method]], args, kwargs)


# --- what answers ---


def answer(
    prompt: list[int], max_tokens: int, end_id: int | None, min_tokens: int, stops: list[list[int]]
) -> list[int]:
    """The prompt backwards, up to an end or its longest."""
    assert all(type(token) is int for token in prompt), "tokens are Python's integers"
    assert type(max_tokens) is int and max_tokens > 0
    tokens: list[int] = []
    for token in prompt[::-1][:max_tokens]:
        tokens.append(token)
        if len(tokens) >= min_tokens and (
            token == end_id or any(tokens[-len(stop) :] == stop for stop in stops)
        ):
            break
    return tokens


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
    """C++'s session."""

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


# --- the LLM API ---


def set_mpi_comm(*args: Any, **kwargs: Any) -> None:
    global _comm
    _comm = bound("set_mpi_comm", [RECORD["python"]["set_mpi_comm"]["parameters"]], args, kwargs)["new_comm"]


def part_of_model(n_ranks: int) -> int:
    """On each rank of a session: a worker needs the communicator that `set_mpi_comm` was given there."""
    assert _comm is not None and _comm.size == n_ranks
    return _comm.rank


class MpiCommSession:
    """As TensorRT-LLM's: rank 0's work in a thread, the others' through mpi4py."""

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
    """The PyTorch backend's."""

    _arguments = "TorchLlmArgs"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = called("BaseLLM", "__init__", args, kwargs)
        allowed = {field.rstrip("=") for field in fields(self._arguments)} | {"_mpi_session", "backend"}
        for name in values:
            if name not in allowed:
                raise ValueError(f"{type(self).__name__} got invalid argument: {name}")
        assert isinstance(values["kv_cache_config"], LLMAPI.KvCacheConfig)
        assert isinstance(values["scheduler_config"], LLMAPI.SchedulerConfig)
        for policy, kind in (
            ("capacity_scheduler_policy", "CapacitySchedulerPolicy"),
            ("context_chunking_policy", "ContextChunkingPolicy"),
        ):
            said = getattr(values["scheduler_config"], policy, None)
            assert said is None or said in RECORD["bindings"][kind]["members"]
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
    """`GenerationResult`, awaited in the loop where it was asked for."""

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


# --- modules, as the library has them ---


def _module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(f"tensorrt_llm.{name}")
    made.__dict__.update(members)
    sys.modules[made.__name__] = made
    return made


_CONFIGS = (
    "KvCacheConfig",
    "SchedulerConfig",
    "CudaGraphConfig",
    "ExtendedRuntimePerfKnobConfig",
    "CacheTransceiverConfig",
)
bindings = _module("bindings", MpiComm=MpiComm, executor=EXECUTOR)
sys.modules["tensorrt_llm.bindings.executor"] = EXECUTOR
LLMAPI = llmapi = _module(
    "llmapi", LLM=LLM, SamplingParams=SamplingParams, **{name: type(name, (Fields,), {}) for name in _CONFIGS}
)
_module("llmapi.mpi_session", MpiCommSession=MpiCommSession)
_module("_utils", set_mpi_comm=set_mpi_comm)
_module("_tensorrt_engine", LLM=TrtLLM)
