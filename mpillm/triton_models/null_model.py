"""A model of zero cost with the tensors of `tensorrt_llm`: what remains is the cost of Triton and clients.

It answers at once, in one response, with as many tokens as are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        """It has nothing to load."""

    def execute(self, requests: Sequence[Any]) -> None:
        """Answer each."""
        for request in requests:
            n = int(
                pb_utils.get_input_tensor_by_name(request, "request_output_len").as_numpy().reshape(-1)[0]
            )
            request.get_response_sender().send(answer(np.arange(3, 3 + n, dtype=np.int32)), flags=FINAL)


def answer(tokens: Any) -> Any:
    """Return a response with these tokens."""
    length = np.array([[len(tokens)]], np.int32)
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("output_ids", tokens[None, None]), pb_utils.Tensor("sequence_length", length)]
    )
