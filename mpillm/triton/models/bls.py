"""The `tensorrt_llm_bls` model: text to text through three other models, for Triton's Python backend.

Works like the ensemble, and can also join the pieces of a stream (`accumulate_tokens`). Each request has a
thread that waits for the other models, so one instance processes many requests concurrently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from mpillm.triton.models.embedded import as_bool
from mpillm.triton.models.preprocessing import inputs
from mpillm.triton.parameters import text_parameter
from mpillm.triton.text_models import FROM_PREPROCESSING, TO_ENGINE, TO_PREPROCESSING

_MAX_CONCURRENT = 256  # requests of an instance
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Inputs of this model that `preprocessing` takes, and the names of its inputs.
_TO_PREPROCESSING = {
    name: input_name for input_name, name in TO_PREPROCESSING.items() if input_name != "PROMPT_TABLE_EXTRA_ID"
}
_PASSED_ON = (
    *("cum_log_probs", "output_log_probs", "context_logits", "generation_logits"),
    *("batch_index", "sequence_index", "num_input_tokens", "num_output_tokens"),
)
_SPECULATIVE = ("num_draft_tokens", "use_draft_logits")

Tensors = dict[str, NDArray[Any]]


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        self._is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._accumulate = as_bool(text_parameter(parameters, "accumulate_tokens") or "false")
        self._engine = text_parameter(parameters, "tensorrt_llm_model_name") or "tensorrt_llm"
        self._threads = ThreadPoolExecutor(_MAX_CONCURRENT, "mpillm-bls")

    def execute(self, requests: Sequence[Any]) -> None:
        """Start a thread for each request."""
        for request in requests:
            self._threads.submit(
                self._run, request.request_id(), request.get_response_sender(), inputs(request)
            )

    def finalize(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _run(self, request_id: str, sender: Any, tensors: Tensors) -> None:
        try:
            last = None
            for outputs in self._answer(request_id, tensors):
                if last is not None:
                    sender.send(last)
                last = pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in outputs.items()])
            sender.send(last, flags=_FINAL)
        except Exception as error:  # noqa: BLE001 - the client must receive it
            sender.send(
                pb_utils.InferenceResponse(error=pb_utils.TritonError(f"tensorrt_llm_bls: {error}")),
                flags=_FINAL,
            )

    def _answer(self, request_id: str, tensors: Tensors) -> Iterator[Tensors]:
        if any(np.any(tensors[name]) for name in _SPECULATIVE if name in tensors):
            raise ValueError("num_draft_tokens: there is no draft model; leave it out")
        if "stream" in tensors and np.any(tensors["stream"]) and not self._is_decoupled:
            raise ValueError("stream: the model is not decoupled")
        text_inputs = {to: tensors[name] for name, to in _TO_PREPROCESSING.items() if name in tensors}
        (tokens,) = self._infer("preprocessing", request_id, text_inputs, [*FROM_PREPROCESSING])
        engine_inputs = {name: tokens[output] for output, name in FROM_PREPROCESSING.items()}
        engine_inputs |= {
            TO_ENGINE.get(name, name): value
            for name, value in tensors.items()
            if name not in _TO_PREPROCESSING and name not in _SPECULATIVE
        }
        for name, value in engine_inputs.items():
            if value.ndim == 1:  # a scalar of the engine's model, without its second dimension here
                engine_inputs[name] = value.reshape(-1, 1)
        so_far: dict[int, list[int]] = {}
        for part in self._infer(
            self._engine, request_id, engine_inputs, ["output_ids", "sequence_length", *_PASSED_ON]
        ):
            ids, lengths = part["output_ids"], part["sequence_length"]
            if self._accumulate and np.any(tensors.get("stream", False)):
                output = so_far.setdefault(int(part["batch_index"].reshape(-1)[0]), [])
                output += ids[0, 0].tolist()
                ids = np.array([[output]], np.int32).reshape(1, 1, len(output))
                lengths = np.array([[len(output)]], np.int32)
            (text,) = self._infer(
                "postprocessing", request_id, {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": lengths}, ["OUTPUT"]
            )
            yield {"text_output": text["OUTPUT"], **{name: part[name] for name in _PASSED_ON if name in part}}

    def _infer(self, model: str, request_id: str, tensors: Tensors, outputs: list[str]) -> Iterator[Tensors]:
        """Yield the responses of another model. Raises TritonModelException if it fails."""
        request = pb_utils.InferenceRequest(
            model_name=model,
            request_id=request_id,
            inputs=[pb_utils.Tensor(name, value) for name, value in tensors.items()],
            requested_output_names=outputs,
        )
        is_engine = model == self._engine
        answers = request.exec(decoupled=True) if is_engine and self._is_decoupled else [request.exec()]
        for answer in answers:
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            if tensors := answer.output_tensors():  # the last response of a stream may have none
                yield {tensor.name(): tensor.as_numpy() for tensor in tensors}
