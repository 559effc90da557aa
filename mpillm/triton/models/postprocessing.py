"""The `postprocessing` model: tokens to text, for Triton's Python backend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from mpillm.data.tokenizer import load_tokenizer
from mpillm.triton.models.embedded import as_bool
from mpillm.triton.models.preprocessing import inputs
from mpillm.triton.parameters import text_parameter


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer of `tokenizer_dir`."""
        parameters = json.loads(args["model_config"])["parameters"]
        folder = text_parameter(parameters, "tokenizer_dir")
        self._tokenizer = load_tokenizer(Path(folder) if folder else None, False)
        self._keep_special = not as_bool(text_parameter(parameters, "skip_special_tokens") or "true")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a text for each beam of each sequence."""
        responses = []
        for request in requests:
            tensors = inputs(request)
            tokens, lengths = tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"]
            # One dimension, like TensorRT-LLM: the beams of the first sequence, of the second, …
            texts = [
                self._tokenizer.decode(beam[:n].tolist(), keep_special=self._keep_special).encode()
                for beams, counts in zip(tokens, lengths, strict=True)
                for beam, n in zip(beams, counts, strict=True)
            ]
            output = pb_utils.Tensor("OUTPUT", np.array(texts, dtype=object))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
