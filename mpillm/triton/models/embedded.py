"""The `tensorrt_llm` model with the embedded engine, for Triton's Python backend.

Each instance of the model has one engine. `execute` only parses requests and submits them to the engine's
thread, which sends the responses. In decoupled mode, a streaming request gets one response per step.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import numpy as np

# Only available inside tritonserver's Python backend.
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from disagg.errors import ConfigError
from launch.logs import log_to
from mpillm.engine.extras.lora import Adapter, Adapters
from mpillm.engine.extras.request_extras import RequestExtras
from mpillm.engine.shape.engine_config import EngineConfig, SchedulerConfig
from mpillm.files import excerpt
from mpillm.triton.models.engine_metrics import EngineMetrics
from mpillm.triton.models.engine_ranks import join, make_core
from mpillm.triton.models.engine_thread import EngineResponse, EngineThread, TakesExtras
from mpillm.triton.models.requests import PromptRequest, RequestError, Tensors, read
from mpillm.triton.parameters import text_parameter, unused_parameters

_log = logging.getLogger(__name__)
_LORA_BYTES = 1 << 30  # of cached adapters; default of `lora_cache_host_memory_bytes`
_CHECK_S = 0.1  # between checks for cancellations; default of `cancellation_check_period_ms`
_POLICIES = {"max_utilization": "max_util", "guaranteed_no_evict": "no_evict"}


def engine_config(model_config: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's configuration from the parameter `core_config` (JSON).

    Parameters of TensorRT-LLM's model take precedence. Raises ConfigError if a parameter is wrong.
    """
    parameter = partial(_parameter, model_config["parameters"])
    values: dict[str, Any] = parameter("core_config", _core_values) or {}
    overrides = {
        "kv_cache_tokens": parameter("max_tokens_in_paged_kv_cache", int),
        "kv_cache_free_gpu_mem_fraction": parameter("kv_cache_free_gpu_mem_fraction", float),
        "enable_kv_cache_reuse": parameter("enable_kv_cache_reuse", as_bool),
        "enable_chunked_context": parameter("enable_chunked_context", as_bool),
        "batch_scheduler_policy": parameter("batch_scheduler_policy", _POLICIES.__getitem__),
    }
    if parameter("gpt_model_type", str) == "V1":
        overrides["batch_scheduler_policy"] = "static"
    values |= {name: value for name, value in overrides.items() if value is not None}
    return EngineConfig.of({"n_threads": len(os.sched_getaffinity(0)), **values})


def _parameter(parameters: Mapping[str, Mapping[str, str]], name: str, convert: Callable[[str], Any]) -> Any:
    """Return a parameter's value; None if it is not set. Raises ConfigError."""
    value = text_parameter(parameters, name)
    try:
        converted = None if value is None else convert(value)
        if isinstance(converted, int) and abs(converted) > 1 << 62:
            raise ValueError
    except (ValueError, KeyError, RecursionError) as error:
        why = f" ({error})" if convert is _core_values else ""
        raise ConfigError(f"parameter {name}: {excerpt(value)} is not possible here{why}") from None
    return converted


def _core_values(text: str) -> dict[str, Any]:
    """Parse the parameter `core_config`. Raises ValueError."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not an object")
    hints = get_type_hints(SchedulerConfig) | get_type_hints(EngineConfig)
    for name, value in values.items():
        if name == "scheduler" or name not in hints or not _fits(value, hints[name]):
            raise ValueError(f"{excerpt(name)}: {excerpt(value)}")
    return values


_IN_JSON = {tuple: list, Mapping: dict}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a JSON value is of a field's type, also within a list of integers."""
    for kind in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        plain = get_origin(kind) or kind
        if type(value) is _IN_JSON.get(plain, plain) or (plain is float and type(value) is int):
            return kind != tuple[int, ...] or all(type(one) is int for one in value)
    return False


def as_bool(value: str) -> bool:
    """Parse a boolean parameter like TensorRT-LLM's model."""
    return value.lower() in ("1", "true")


class TritonPythonModel:
    """Instance of the model; Triton's Python backend creates it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine. Triton logs an exception, and the model is then not ready."""
        faulthandler.enable()  # prints the Python stacks of all threads if the process crashes
        log_to(sys.stderr, f"{args['model_name']}: %(levelname)s %(message)s")
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        self._is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._exclude_input = as_bool(text_parameter(parameters, "exclude_input_in_output") or "false")
        parameter = partial(_parameter, parameters)
        self._requests: dict[int, _OpenRequest] = {}
        self._lock = threading.Lock()
        try:
            period_ms = parameter("cancellation_check_period_ms", int)
            cache_bytes = parameter("lora_cache_host_memory_bytes", int)
            self._adapters = Adapters(cache_bytes or _LORA_BYTES)
            self._max_beam_width = parameter("max_beam_width", int) or 1
            engine = engine_config(config)
            texts = {name: value.get("string_value", "") for name, value in parameters.items()}
            if line := unused_parameters(texts):
                _log.warning("%s", line)
            worker_path = text_parameter(parameters, "executor_worker_path")
            self._ranks = join(engine, worker_path or sys.executable)
            core = make_core(engine, self._ranks)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        began = time.monotonic()
        core.load()
        if self._ranks is not None and self._ranks.rank > 0:
            _log.info("follows rank 0")
            self._ranks.follow(core)
            raise pb_utils.TritonModelException("rank 0 of the engine has ended")
        core.run_health_check()
        _log.info("the engine is ready after %.1f s: %s", time.monotonic() - began, engine.model_path)
        self._core = core
        self._metrics = EngineMetrics(cast(Any, core).engine, args["model_name"], args["model_version"])
        self._engine = EngineThread(
            core,
            period_ms / 1000 if period_ms else _CHECK_S,
            self._look,
            None if self._ranks is None else self._ranks.why_failed,
        )
        if self._ranks is not None:
            self._ranks.watch(self._engine.fail)

    def execute(self, requests: Sequence[Any]) -> None:
        """Submit the requests to the engine, which responds through each request's sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                if (stop := tensors.get("stop")) is not None and bool(np.any(stop)):
                    self._stop(request.request_id())
                    sender.send(pb_utils.InferenceResponse([]), flags=_FINAL)
                    continue
                prompts = [self._read(row) for row in _rows(tensors)]
                if not self._is_decoupled:
                    _check_single(prompts)
            except RequestError as error:
                _fail(sender, str(error))
                continue
            opened = _OpenRequest(request.request_id(), sender, prompts, self._forget)
            with self._lock:
                self._requests[id(opened)] = opened
            self._engine.submit(opened.responses)

    def _read(self, tensors: Tensors) -> PromptRequest:
        can = self._core if isinstance(self._core, TakesExtras) else None
        return read(
            tensors,
            self._exclude_input,
            takes_extras=can is not None and can.takes_extras,
            max_beam_width=self._max_beam_width,
            find_adapter=self._adapter if can is not None and can.takes_adapters else None,
        )

    def _adapter(self, task_id: int, weights: NDArray[Any] | None, config: NDArray[Any] | None) -> Adapter:
        def make() -> Adapter:
            assert weights is not None and config is not None
            assert isinstance(self._core, TakesExtras)
            return self._core.make_adapter(weights, config)

        try:
            return self._adapters.get(task_id, None if weights is None or config is None else make)
        except (LookupError, ValueError) as error:
            raise RequestError(str(error.args[0])) from error

    def finalize(self) -> None:
        """Stop the engine; open requests get an error."""
        self._engine.stop()
        self._metrics.close()
        if self._ranks is not None:
            self._ranks.stop()

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise RequestError("stop: the request has no id, so nothing can be stopped by it")
        with self._lock:
            requests = [one for one in self._requests.values() if one.request_id == request_id]
        self._cancel(requests)

    def _cancel(self, requests: Sequence[_OpenRequest]) -> None:
        self._engine.cancel([response for request in requests for response in request.responses])

    def _look(self) -> None:
        """Update metrics, and cancel requests that Triton reports as cancelled. On the engine's thread."""
        self._metrics.update()
        with self._lock:
            requests = [one for one in self._requests.values() if one.sender.is_cancelled()]
        self._cancel(requests)

    def _forget(self, request: _OpenRequest) -> None:
        with self._lock:
            del self._requests[id(request)]


_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def _rows(tensors: Tensors) -> list[Tensors]:
    """Return the inputs of each prompt of a request. Raises RequestError if batch sizes differ."""
    sizes = {len(value) for value in tensors.values()}
    if len(sizes) != 1:
        raise RequestError(f"the inputs are of batches of {' and '.join(map(str, sorted(sizes)))}")
    return [{name: value[i] for name, value in tensors.items()} for i in range(sizes.pop())]


def _check_single(prompts: list[PromptRequest]) -> None:
    if any(prompt.streaming for prompt in prompts):
        raise RequestError("streaming: the model is not decoupled")
    if len(prompts) > 1:
        raise RequestError(f"a batch of {len(prompts)}: the model is not decoupled, so it answers one prompt")


def _fail(sender: Any, message: str) -> None:
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message)), flags=_FINAL)


class _OpenRequest:
    """An open request with one or more prompts. The last response of all prompts carries the final flag."""

    def __init__(
        self,
        request_id: str,
        sender: Any,
        prompts: list[PromptRequest],
        on_end: Callable[[_OpenRequest], None],
    ) -> None:
        self.request_id = request_id
        self.sender = sender
        self.responses = [EngineResponse(prompt, self._send) for prompt in prompts]
        self._n_open = len(prompts)
        self._on_end = on_end

    def _send(self, answer: EngineResponse, tokens: Sequence[int], is_final: bool, error: str) -> None:
        self._n_open -= is_final
        flags = _FINAL if self._n_open == 0 else 0
        if self._n_open == 0:
            self._on_end(self)
        if error:
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(error))
        else:
            response = pb_utils.InferenceResponse(
                [pb_utils.Tensor(name, value) for name, value in self._outputs(answer, tokens).items()]
            )
        self.sender.send(response, flags=flags)
        if self._n_open == 0:
            # Breaks a reference cycle with the sender. Triton waits for every sender before it unloads a
            # model.
            self.responses.clear()

    def _outputs(self, answer: EngineResponse, tokens: Sequence[int]) -> dict[str, Any]:
        request = answer.request
        before = [] if request.streaming or request.exclude_input else request.prompt
        new = slice(answer.n_sent - len(tokens), answer.n_sent)
        beams = answer.beams() or [([*tokens], answer.logprobs[new], sum(answer.logprobs[: new.stop]))]
        n = max(len(ids) for ids, _, _ in beams)
        ids = np.zeros((1, len(beams), len(before) + n), np.int32)
        log_probs, sums = np.zeros((1, len(beams), n), np.float32), np.zeros((1, len(beams)), np.float32)
        for i, (new_ids, each, total) in enumerate(beams):
            ids[0, i, : len(before) + len(new_ids)] = [*before, *new_ids]
            if request.log_probs:  # otherwise zeros, like TensorRT-LLM's model
                log_probs[0, i, : len(each)], sums[0, i] = each, total
        outputs = {
            "output_ids": ids,
            "sequence_length": np.array([[len(before) + len(new_ids) for new_ids, _, _ in beams]], np.int32),
            "batch_index": np.array([[self.responses.index(answer)]], np.int32),
            "sequence_index": np.zeros((1, 1), np.int32),
            "cum_log_probs": sums,
            "output_log_probs": log_probs,
        }
        if request.extras is not None:
            outputs |= _logits(request.extras, new)
        if request.num_input_tokens:
            outputs["num_input_tokens"] = np.array([[len(request.prompt)]], np.int32)
        if request.num_output_tokens:
            outputs["num_output_tokens"] = np.array([[len(answer.tokens)]], np.int32)
        return outputs


def _logits(extras: RequestExtras, new: slice) -> dict[str, Any]:
    """Return requested logits: of the prompt (in each response, like TensorRT-LLM), and of `new` tokens."""
    logits = {}
    if extras.keeps_context_logits and extras.context_logits:
        logits["context_logits"] = np.concatenate(extras.context_logits)[None]
    if extras.keeps_generation_logits:
        rows = extras.generation_logits[new]
        logits["generation_logits"] = np.array([[rows]], np.float32)
    return logits
