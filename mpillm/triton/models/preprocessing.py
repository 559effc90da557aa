"""The `preprocessing` model: text to tokens, for Triton's Python backend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from mpillm.data.tokenizer import Tokenizer, load_tokenizer
from mpillm.triton.models.embedded import as_bool
from mpillm.triton.models.requests import OWN_END
from mpillm.triton.parameters import text_parameter


def word_lists_tensor(lists: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.int32]:
    """Return word lists in TensorRT-LLM's form, [batch, 2, n]: concatenated tokens; ends, padded with -1."""
    n = max([0, *(sum(map(len, row)) for row in lists)])
    tensor = np.zeros((len(lists), 2, n), np.int32)
    tensor[:, 1] = -1
    for both, row in zip(tensor, lists, strict=True):
        tokens = [token for word in row for token in word]
        both[0, : len(tokens)] = tokens
        both[1, : len(row)] = np.cumsum([len(word) for word in row])
    return tensor


def as_text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def inputs(request: Any) -> dict[str, NDArray[Any]]:
    """Return a request's inputs by name, with the batch dimension."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer of `tokenizer_dir`."""
        parameters = json.loads(args["model_config"])["parameters"]
        folder = text_parameter(parameters, "tokenizer_dir")
        self._tokenizer: Tokenizer = load_tokenizer(Path(folder) if folder else None, False)
        special = text_parameter(parameters, "add_special_tokens")
        self._encode = (
            self._tokenizer.encode_plain if special and not as_bool(special) else self._tokenizer.encode_text
        )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return one response per request. An error only affects its own request."""
        responses = []
        for request in requests:
            try:
                responses.append(self._response(inputs(request)))
            except (ValueError, KeyError) as error:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
        return responses

    def _response(self, tensors: Mapping[str, NDArray[Any]]) -> Any:
        prompts = [self._encode(as_text(row.reshape(-1)[0])) for row in tensors["QUERY"]]
        n, batch = max(map(len, prompts)), len(prompts)
        pad, end = tensors.get("PAD_ID"), tensors.get("END_ID")
        ids = np.full((batch, n), 0 if pad is None else pad.reshape(-1)[0], np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        outputs = {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": np.array([[len(prompt)] for prompt in prompts], np.int32),
            "DECODER_INPUT_ID": np.zeros((batch, 1), np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.ones((batch, 1), np.int32),
            "BAD_WORDS_IDS": self._word_lists(tensors.get("BAD_WORDS_DICT"), batch),
            "STOP_WORDS_IDS": self._word_lists(tensors.get("STOP_WORDS_DICT"), batch),
            "EMBEDDING_BIAS": self._bias(tensors, batch),
            "REQUEST_OUTPUT_LEN": tensors["REQUEST_OUTPUT_LEN"].astype(np.int32),
            "OUT_END_ID": _column(end, batch, OWN_END),
            "OUT_PAD_ID": _column(pad, batch, 0),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])

    def _word_lists(self, texts: NDArray[Any] | None, batch: int) -> NDArray[np.int32]:
        rows = [[]] * batch if texts is None else [row.reshape(-1) for row in texts]
        return word_lists_tensor(
            [[ids for word in row if (ids := self._tokenizer.encode_plain(as_text(word)))] for row in rows]
        )

    def _bias(self, tensors: Mapping[str, NDArray[Any]], batch: int) -> NDArray[np.float32]:
        biased = tensors.get("EMBEDDING_BIAS_WORDS")
        if biased is not None and any(as_text(word) for word in biased.reshape(-1)):
            raise ValueError("embedding_bias_words: the embedded engine has no such thing; leave it out")
        return np.zeros((batch, 0), np.float32)


def _column(value: NDArray[Any] | None, batch: int, default: int) -> NDArray[np.int32]:
    """Return a column with one number per prompt."""
    return (
        np.full((batch, 1), default, np.int32) if value is None else value.reshape(batch, 1).astype(np.int32)
    )
