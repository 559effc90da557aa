"""A model without computation, with the tensors of `tensorrt_llm`: measures the cost of Triton and clients.

It answers immediately, in one response, with the requested number of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        """Read whether the model is decoupled."""
        self._decoupled = json.loads(args["model_config"])["model_transaction_policy"]["decoupled"]

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer each request."""
        answers = [answer(_tokens(request)) for request in requests]
        if not self._decoupled:
            return answers
        for request, one in zip(requests, answers, strict=True):
            request.get_response_sender().send(one, flags=FINAL)
        return None


def _tokens(request: Any) -> Any:
    """Return the requested number of tokens."""
    n = pb_utils.get_input_tensor_by_name(request, "request_output_len").as_numpy().item()
    return np.arange(3, 3 + n, dtype=np.int32)


def answer(tokens: Any) -> Any:
    """Return a response with these tokens."""
    length = np.array([[len(tokens)]], np.int32)
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("output_ids", tokens[None, None]), pb_utils.Tensor("sequence_length", length)]
    )
