"""Run TensorRT-LLM's `LLM` class on an instance's ranks.

Its PyTorch backend executes a Hugging Face folder, its TensorRT backend an engine. The core passes the
instance's communicator as `trtllm-serve disaggregated_mpi_worker` does (tensorrt_llm/commands/serve.py):
`set_mpi_comm` on every rank, a `MpiCommSession` for the `LLM` on rank 0, and on the others mpi4py's
`MPICommExecutor`, which executes the session's tasks. The other ranks do this in a thread, because the main
thread runs mpillm's event loop.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from disagg.errors import ConfigError
from mpillm.comms.messages import Batch
from mpillm.cores.base import CoreConfig, Credits, LLMCore, Metrics, NumericLimits
from mpillm.nvidia.configs import TrtllmExecutorConfig, TrtllmHlApiConfig
from mpillm.options.fields.model import CHUNKING_POLICIES, SCHEDULER_POLICIES
from mpillm.options.mitten import configured
from mpillm.trtllm import library

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.options.run_config import RunConfig

_LLM = {"pytorch": "tensorrt_llm", "cpp": "tensorrt_llm._tensorrt_engine"}
_STATISTICS_S = 0.5
_STOP_S = 60.0


class HlApiSettings(NamedTuple):
    """Configurations for the core."""

    harness: TrtllmHlApiConfig
    engine: TrtllmExecutorConfig | None  # of the C++ backend


class TrtllmHlApiCore(LLMCore):
    """TensorRT-LLM's `LLM` class: a Hugging Face folder for its PyTorch backend, or an engine."""

    uses_gpus = True
    world_import = library.PACKAGE
    engine_stages = "mpillm.trtllm.engines:checkpoint_stages"
    framework = "TensorRT-LLM"
    packages = (library.PACKAGE,)

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        super().__init__(config, comms)
        settings: HlApiSettings = config.settings
        self._harness = settings.harness
        # The limits of an engine's build, unless flags lower them.
        scheduler = config.engine.scheduler
        flags = settings.engine.runtime_flags if settings.engine else {}
        self._max_batch_size = flags.get("max_batch_size", scheduler.max_batch_size)
        self._max_num_tokens = flags.get("max_num_tokens", scheduler.max_num_tokens)
        self._llm: Any = None
        # Runs an event loop on the root rank, a worker on the others.
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: asyncio.Event | None = None
        self._results: dict[int, Any] = {}  # by request, for the event loop's thread
        # From that thread: request, new tokens, whether they are the last.
        self._received: deque[tuple[int, list[int], bool]] = deque()
        self._errors: deque[tuple[int | None, BaseException]] = deque()  # with the request, if any
        self._answers = library.LibraryRequests(config.rank)
        self._prompts: dict[int, int] = {}  # tokens of each prompt without a first token
        self._prompt_tokens = self._generated = 0
        self._now = (0, 0, 0.0)  # running and waiting requests, used share of the KV cache

    @classmethod
    def settings(cls, config: RunConfig) -> HlApiSettings:
        harness = configured(TrtllmHlApiConfig, config)
        engine = None if harness.backend_type == "pytorch" else configured(TrtllmExecutorConfig, config)
        return HlApiSettings(harness, engine)

    @classmethod
    def check(cls, config: CoreConfig) -> NumericLimits:
        library.check_library(config)
        if too_long := [word for word in config.engine.stop_words if len(word) > 1]:
            raise ConfigError(
                f"--stop_words {list(too_long[0])}: TensorRT-LLM's LLM takes stop words of one token where it"
                " reads no text; use --core_type trtllm_executor",
                about=["stop_words"],
            )
        settings: HlApiSettings = config.settings
        library.end_ids(config)
        if settings.engine is None:
            return library.folder_limits(config)
        assert settings.engine.engine_config is not None
        return library.engine_limits(config, settings.engine.engine_config)

    # --- life ---

    @property
    def _leads(self) -> bool:
        return self.comms is None or self.comms.instance.rank == 0

    def load(self) -> None:
        from mpi4py import MPI

        package = importlib.import_module("tensorrt_llm")
        if (version := package.__version__).startswith("0."):
            raise ConfigError(
                f"--core_type {self.config.core_type}: TensorRT-LLM {version} has another LLM class;"
                " use 1.0 or later, or --core_type trtllm_executor with an engine",
                about=["core_type"],
            )
        comm = MPI.COMM_SELF if self.comms is None else self.comms.instance
        if MPI.COMM_WORLD.size == 1:
            # Otherwise tensorrt_llm/executor/executor.py starts a process with MPI and ignores the session.
            os.environ.setdefault("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
        importlib.import_module("tensorrt_llm._utils").set_mpi_comm(comm)
        if not self._leads:
            self._start(self._serve)
            return
        self._sampling = package.SamplingParams
        self._ends = library.end_ids(self.config)
        try:
            module = importlib.import_module(_LLM[self._harness.backend_type])
        except ModuleNotFoundError as error:
            raise library.no_engines(self.config) from error
        sessions = importlib.import_module("tensorrt_llm.llmapi.mpi_session")
        session = sessions.MpiCommSession(comm=comm, n_workers=comm.size)
        self._llm = module.LLM(**self._arguments(), _mpi_session=session)
        ready = threading.Event()
        self._start(lambda: asyncio.run(self._live(ready)))
        if not ready.wait(_STOP_S):
            raise RuntimeError(
                f"the event loop for TensorRT-LLM's answers did not start within {_STOP_S:g} s"
            )

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of `LLM`. TensorRT-LLM's error for an unknown flag contains its name."""
        engine, scheduling = self.config.engine, self.config.engine.scheduler
        api = importlib.import_module("tensorrt_llm.llmapi")
        pytorch = self._harness.backend_type == "pytorch"
        cache = {
            "enable_block_reuse": scheduling.enable_kv_cache_reuse,
            "free_gpu_memory_fraction": engine.kv_cache_free_gpu_mem_fraction,
        }
        if engine.kv_cache_tokens is not None:
            cache["max_tokens"] = engine.kv_cache_tokens
        scheduler = {"capacity_scheduler_policy": SCHEDULER_POLICIES[scheduling.batch_scheduler_policy]}
        if scheduling.enable_chunked_context:
            scheduler["context_chunking_policy"] = CHUNKING_POLICIES[scheduling.context_chunking_policy]
        arguments = {
            "model": engine.model_path if pytorch else engine.engine_dir,
            "skip_tokenizer_init": True,  # prompts and answers are tokens
            "tensor_parallel_size": engine.tp_size,
            "pipeline_parallel_size": engine.pp_size,
            "moe_expert_parallel_size": engine.ep_size if engine.ep_size > 1 else None,
            "max_batch_size": self._max_batch_size,
            "max_num_tokens": self._max_num_tokens,
            "max_seq_len": engine.max_seq_len,
            "max_beam_width": engine.beam_width,
            "enable_chunked_prefill": scheduling.enable_chunked_context,
            "kv_cache_config": api.KvCacheConfig(**cache),
            "scheduler_config": api.SchedulerConfig(**scheduler),
        }
        if pytorch:
            arguments |= {"enable_iter_perf_stats": True, "load_format": engine.load_format}
        return {
            name: value
            for name, value in (arguments | library.others(self._harness.runtime_flags)).items()
            if value is not None
        }

    def _start(self, work: Any) -> None:
        self._thread = threading.Thread(target=self._guarded, args=(work,), name="tensorrt_llm", daemon=True)
        self._thread.start()

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._errors.append((None, error))

    def _serve(self) -> None:
        """Execute the tasks of rank 0's session until it is shut down."""
        from mpi4py.futures import MPICommExecutor

        assert self.comms is not None
        with MPICommExecutor(self.comms.instance) as executor:
            if executor is not None:
                raise RuntimeError("rank 0 of an instance's communicator follows")

    def run_health_check(self) -> None:
        if self._thread is not None and not self._thread.is_alive():
            self._check()
            raise RuntimeError("TensorRT-LLM's thread on this rank has ended")

    def start_test(self) -> None:
        self._prompt_tokens = self._generated = 0

    def metrics(self) -> Metrics | None:
        if self._llm is None:
            return None
        running, waiting, share = self._now if len(self._answers) else (0, 0, 0.0)
        return Metrics(self._prompt_tokens, self._generated, running, waiting, share)

    def notify_stop(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()  # also ends the session, and `_serve` on the other ranks
            self.loop.call_soon_threadsafe(self._end)
        if self._thread is not None:
            self._thread.join(_STOP_S)

    # --- the event loop's thread ---

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the trtllm_hlapi core is not loaded, or this rank does not lead its instance")
        return self._loop

    async def _live(self, ready: threading.Event) -> None:
        """Run until the core stops; drop the open requests."""
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        watch = asyncio.create_task(self._watch())
        ready.set()
        await self._done.wait()
        watch.cancel()

    def _end(self) -> None:
        if self._done is not None:
            self._done.set()

    def _schedule(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _generate(self, request: Batch) -> None:
        """Generate a response. A result must be awaited in the thread of its request."""
        (row,) = request.rows
        id_, n, end_id = int(row["id"]), 0, library.ends_of(row, self._ends)[0]
        params = self._sampling(
            max_tokens=int(row["max_output"]),
            end_id=end_id,
            pad_id=max(end_id, 0),
            stop_token_ids=[token for (token,) in library.stops(self.config, row, self._ends)] or None,
            include_stop_str_in_output=True,
            detokenize=False,
            **library.sampling(row),
        )
        try:
            result = self._results[id_] = self._llm.generate_async(
                request.tokens.tolist(), params, streaming=library.streams(row, self._harness.streaming)
            )
            async for part in result:
                tokens = part.outputs[0].token_ids  # all tokens so far
                self._received.append((id_, tokens[n:], part.finished))
                n = len(tokens)
        except Exception as error:  # noqa: BLE001 - it ends the run, with the request's name
            self._errors.append((id_, error))
        finally:
            self._results.pop(id_, None)

    async def _abort(self, ids: list[int]) -> None:
        for id_ in ids:
            if (result := self._results.get(id_)) is not None:
                result.abort()

    async def _watch(self) -> None:
        """Store the newest statistics, TensorRT-LLM's JSON of an iteration."""
        while True:
            try:
                async for step in self._llm.get_stats_async(_STATISTICS_S):
                    cache = step.get("kvCacheStats") or {}
                    share = (
                        cache["usedNumBlocks"] / cache["maxNumBlocks"] if cache.get("maxNumBlocks") else 0.0
                    )
                    self._now = step.get("numActiveRequests", 0), step.get("numQueuedRequests", 0), share
            except Exception as error:  # noqa: BLE001 - a run needs its statistics
                self._errors.append((None, error))
                return
            await asyncio.sleep(_STATISTICS_S)

    # --- work ---

    def credits(self) -> Credits:
        return Credits(
            2 * self._max_batch_size, self.config.engine.kv_cache_tokens or library.UNLIMITED_TOKENS
        )

    def enqueue(self, requests: Batch) -> None:
        self._answers.begin(requests)
        self._prompts.update(
            zip(requests.rows["id"].tolist(), requests.rows["n_tokens"].tolist(), strict=True)
        )
        for request in requests.split():
            self._schedule(self._generate(Batch(request.rows.copy(), request.tokens.copy())))

    def has_work(self) -> bool:
        return bool(self._received or self._errors)

    def poll_responses(self) -> Batch | None:
        self._check()
        for _ in range(len(self._received)):
            id_, tokens, is_final = self._received.popleft()
            self._prompt_tokens += self._prompts.pop(id_, 0)
            self._generated += len(tokens)
            self._answers.add(id_, tokens, is_final)
        return self._answers.take()

    def _check(self) -> None:
        if self._errors:
            id_, error = self._errors.popleft()
            if id_ is None:
                raise error
            raise self._answers.failed(id_, error) from error

    def cancel(self, ids: Iterable[int]) -> None:
        self._schedule(self._abort(self._answers.cancel(ids)))
