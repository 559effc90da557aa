"""Run TensorRT-LLM's `Executor`: an engine of `trtllm-build` in this process, or in processes it starts.

Releases after `installed.LAST_WITH_ENGINES` have neither.

The interface is tensorrt_llm.bindings.executor, declared in cpp/tensorrt_llm/nanobind/executor (pybind in
older versions). In leader mode, every rank of the instance creates an `Executor`. The one on the
communicator's rank 0 accepts requests; the others follow it in C++ threads until it is shut down. In
orchestrator mode, the root rank starts a worker process for each part of the engine.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from disagg.errors import ConfigError, about
from mpillm.comms.messages import Batch
from mpillm.cores.base import CoreConfig, Credits, LLMCore, Metrics, NumericLimits, check_option_names
from mpillm.nvidia.configs import TrtllmExecutorConfig
from mpillm.options.fields.model import CHUNKING_POLICIES, SCHEDULER_POLICIES
from mpillm.options.mitten import configured
from mpillm.trtllm import library

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.options.run_config import RunConfig

_NOW = timedelta(0)


@dataclass(frozen=True)
class ExecutorOptions:
    """--core_options of this core."""

    orchestrator: bool = False
    worker_path: str = ""  # path of TensorRT-LLM's executorWorker, for orchestrator mode

    @staticmethod
    @about("core_options")
    def from_options(options: dict[str, Any]) -> ExecutorOptions:
        check_option_names(options, ExecutorOptions.__dataclass_fields__, "the trtllm_executor core")
        if (value := str(options.get("orchestrator", "false")).lower()) not in ("true", "false"):
            raise ConfigError(f"--core_options orchestrator:{value}: expected true or false")
        parsed = ExecutorOptions(value == "true", str(options.get("worker_path", "")))
        if parsed.orchestrator != bool(parsed.worker_path):
            raise ConfigError(
                "--core_options orchestrator:true needs worker_path:PATH, of executorWorker, and vice versa"
            )
        return parsed


class TrtllmExecutorCore(LLMCore):
    """An engine of `trtllm-build`, in this process."""

    uses_gpus = True
    tunes_steps = True
    world_import = library.PACKAGE
    engine_stages = "mpillm.trtllm.engines:engine_stages"
    framework = "TensorRT-LLM"
    packages = (library.PACKAGE,)

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        super().__init__(config, comms)
        self.options = ExecutorOptions.from_options(config.options)
        self._harness: TrtllmExecutorConfig = config.settings
        self._executor: Any = None
        self._ids: dict[int, int] = {}  # request id by the library's id
        self._answers = library.LibraryRequests(config.rank)
        self._prompt_tokens = self._steps = 0  # since the test's start; a step of a request is one token
        self._now = (0, 0, 0.0)  # running and waiting requests, used share of the KV cache

    @classmethod
    def settings(cls, config: RunConfig) -> TrtllmExecutorConfig:
        return configured(TrtllmExecutorConfig, config)

    @classmethod
    def check(cls, config: CoreConfig) -> NumericLimits:
        library.check_library(config)
        ExecutorOptions.from_options(config.options)
        harness: TrtllmExecutorConfig = config.settings
        if not harness.runtime_flags["exclude_input_from_output"]:
            raise ConfigError(
                "trtllm_runtime_flags exclude_input_from_output false: LoadGen needs answers without prompts"
            )
        library.end_ids(config)
        assert harness.engine_config is not None
        return library.engine_limits(config, harness.engine_config)

    # --- life ---

    @property
    def _leads(self) -> bool:
        return self.comms is None or self.comms.instance.rank == 0

    def load(self) -> None:
        self._tle = importlib.import_module("tensorrt_llm.bindings.executor")
        if not hasattr(self._tle, "Executor"):
            raise library.no_engines(self.config)
        self._ends = library.end_ids(self.config)
        gpu = self.config.engine.gpu
        devices = [gpu] if self.comms is None else self.comms.instance.allgather(gpu)
        if self.options.orchestrator and not self._leads:
            return  # the root rank's worker processes hold the engine
        if self.comms is not None and not self.options.orchestrator:
            # tensorrt_llm/llmapi/mpi_session.py passes a communicator other than the world to C++ this way.
            comm = importlib.import_module("tensorrt_llm.bindings").MpiComm
            comm.set_raw_mpi_session_by_fortran_handle(self.comms.instance.py2f())
        config = self._executor_config([device for device in devices if device is not None] or None)
        self._executor = self._tle.Executor(
            self._harness.engine_dir, self._tle.ModelType.DECODER_ONLY, config
        )

    def _executor_config(self, devices: list[int] | None) -> Any:
        """Return an ExecutorConfig. Raises ConfigError for a flag that TensorRT-LLM does not have."""
        tle, engine, flags = self._tle, self.config.engine, self._harness.runtime_flags
        scheduling = engine.scheduler
        tuning = tle.DynamicBatchConfig(
            flags["enable_batch_size_tuning"],
            flags["enable_max_num_tokens_tuning"],
            flags["dynamic_batch_moving_average_window"],
        )
        scheduler = tle.SchedulerConfig(
            getattr(tle.CapacitySchedulerPolicy, SCHEDULER_POLICIES[scheduling.batch_scheduler_policy]),
            getattr(tle.ContextChunkingPolicy, CHUNKING_POLICIES[scheduling.context_chunking_policy])
            if scheduling.enable_chunked_context
            else None,
            tuning,
        )
        cache = tle.KvCacheConfig(
            enable_block_reuse=scheduling.enable_kv_cache_reuse,
            max_tokens=engine.kv_cache_tokens,
            free_gpu_memory_fraction=engine.kv_cache_free_gpu_mem_fraction,
        )
        mode = (
            tle.CommunicationMode.ORCHESTRATOR if self.options.orchestrator else tle.CommunicationMode.LEADER
        )
        orchestrator = (
            tle.OrchestratorConfig(True, self.options.worker_path) if self.options.orchestrator else None
        )
        parallel = tle.ParallelConfig(
            tle.CommunicationType.MPI, mode, device_ids=devices, orchestrator_config=orchestrator
        )
        knobs, arguments = tle.ExtendedRuntimePerfKnobConfig(), {}
        for name, value in library.others(flags).items():
            if hasattr(knobs, name):  # CUDA graphs, attention's accumulators
                setattr(knobs, name, value)
            else:
                arguments[name] = value
        try:
            return tle.ExecutorConfig(
                engine.beam_width,
                scheduler_config=scheduler,
                kv_cache_config=cache,
                enable_chunked_context=scheduling.enable_chunked_context,
                batching_type=tle.BatchingType.INFLIGHT
                if flags["use_inflight_batching"]
                else tle.BatchingType.STATIC,
                max_batch_size=flags["max_batch_size"],
                max_num_tokens=flags["max_num_tokens"],
                parallel_config=parallel,
                extended_runtime_perf_knob_config=knobs,
                **arguments,
            )
        except TypeError as error:
            raise ConfigError(
                f"trtllm_runtime_flags {', '.join(arguments)}: TensorRT-LLM's ExecutorConfig refuses: {error}"
            ) from error

    def run_health_check(self) -> None:
        if self._executor is not None and self._leads and not self._executor.can_enqueue_requests():
            raise RuntimeError("TensorRT-LLM's Executor accepts no requests on its root rank")

    def start_test(self) -> None:
        self.metrics()
        self._prompt_tokens = self._steps = self._answers.ended = 0

    def metrics(self) -> Metrics | None:
        """Return counts up to the newest iteration.

        The first token of an answer does not belong to a generation step.
        """
        if self._executor is None or not self._leads:
            return None
        for step in self._executor.get_latest_iteration_stats():
            if (batch := step.inflight_batching_stats) is not None:
                self._prompt_tokens += batch.num_ctx_tokens
                self._steps += batch.num_gen_requests
            elif (batch := step.static_batching_stats) is not None:
                self._prompt_tokens += batch.num_ctx_tokens
                self._steps += batch.num_gen_tokens
            cache = step.kv_cache_stats
            share = (
                cache.used_num_blocks / cache.max_num_blocks
                if cache is not None and cache.max_num_blocks
                else 0.0
            )
            self._now = step.num_active_requests, step.num_queued_requests, share
        running, waiting, share = self._now if len(self._answers) else (0, 0, 0.0)
        return Metrics(self._prompt_tokens, self._steps + self._answers.ended, running, waiting, share)

    def notify_stop(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()  # on other ranks, it returns after the root rank's call

    # --- work ---

    def credits(self) -> Credits:
        """Grant twice the batch size, so that a request waits whenever another ends."""
        return Credits(
            2 * self._harness.runtime_flags["max_batch_size"],
            self.config.engine.kv_cache_tokens or library.UNLIMITED_TOKENS,
        )

    def enqueue(self, requests: Batch) -> None:
        new = [self._request(request) for request in requests.split()]
        self._answers.begin(requests)
        self._ids.update(zip(self._executor.enqueue_requests(new), requests.rows["id"].tolist(), strict=True))

    def _request(self, request: Batch) -> Any:
        (row,) = request.rows
        return self._tle.Request(
            request.tokens.tolist(),
            int(row["max_output"]),
            streaming=library.streams(row, self._harness.streaming),
            sampling_config=self._tle.SamplingConfig(self.config.engine.beam_width, **library.sampling(row)),
            output_config=self._tle.OutputConfig(exclude_input_from_output=True),
            end_id=library.ends_of(row, self._ends)[0],
            stop_words=library.stops(self.config, row, self._ends) or None,
        )

    def has_work(self) -> bool:
        return bool(self._ids) and self._executor.get_num_responses_ready() > 0

    def poll_responses(self) -> Batch | None:
        for response in self._executor.await_responses(timeout=_NOW):
            id_ = self._ids[response.request_id]
            if response.has_error():
                raise self._answers.failed(id_, response.error_msg)
            result = response.result
            if result.is_final:
                del self._ids[response.request_id]
            self._answers.add(id_, list(result.output_token_ids[0]), result.is_final)
        return self._answers.take()

    def cancel(self, ids: Any) -> None:
        cancelled = set(self._answers.cancel(ids))
        for library_id, id_ in self._ids.items():
            if id_ in cancelled:
                self._executor.cancel_request(library_id)
