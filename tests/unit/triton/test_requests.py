"""What a request to the `tensorrt_llm` model asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpillm.engine.extras.lora import Adapter
from mpillm.triton.core.tensors import word_list as list_of_words
from mpillm.triton.models.requests import PromptRequest, RequestError, read, word_list

BASE: dict[str, Any] = {"input_ids": [5, 6, 7, 0], "input_lengths": [3], "request_output_len": [4]}


def request_of(**tensors: Any) -> PromptRequest:
    return read({name: np.array(value) for name, value in {**BASE, **tensors}.items()}, exclude_input=False)


def test_default_values() -> None:
    assert request_of() == PromptRequest([5, 6, 7], 4), "padding is cut off, and the answer is greedy"


def test_all_values_are_read() -> None:
    request = request_of(
        temperature=[0.5],
        runtime_top_k=[3],
        runtime_top_p=[0.25],
        seed=[9],
        min_tokens=[2],
        end_id=[1],
        stop_words_list=[[7, 8, 9, 0], [1, 3, -1, -1]],
        streaming=[True],
        exclude_input_in_output=[True],
    )
    expected = PromptRequest([5, 6, 7], 4, 2, 1, ((7,), (8, 9)), 0.5, 3, 0.25, 9, True, True)
    assert replace(request, extras=None) == expected


@pytest.mark.parametrize(
    ("tensors", "sampling"),
    [
        ({"runtime_top_k": [1], "temperature": [0.7]}, (0.0, 0, 1.0)),
        ({"runtime_top_p": [0.5]}, (1.0, 0, 0.5)),
        ({"runtime_top_p": [0.0]}, (0.0, 0, 1.0)),
        ({"runtime_top_k": [0], "temperature": [0.7]}, (pytest.approx(0.7), 0, 1.0)),
    ],
)
def test_sampling(tensors: dict[str, Any], sampling: tuple[float, int, float]) -> None:
    request = request_of(**tensors)
    assert (request.temperature, request.top_k, request.top_p) == sampling


@pytest.mark.parametrize(("end_id", "meant"), [(-1, -1), (-2, None), (2, 2)])
def test_end_ids(end_id: int, meant: int | None) -> None:
    assert request_of(end_id=[end_id]).end_id == meant


def test_values_without_effect_are_accepted() -> None:
    request_of(
        beam_width=[1],
        repetition_penalty=[1.0],
        return_log_probs=[False],
        bad_words_list=np.zeros((2, 0), np.int32),
        embedding_bias=np.zeros(0, np.float32),
        pad_id=[0],
        decoder_input_ids=[0],
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"beam_width": [5]}, "beam_width 5: the model's max_beam_width is 4"),
        ({"beam_width": [2], "streaming": [True]}, "streaming: not with a beam_width above 1"),
        ({"beam_width": [2], "stop_words_list": [[7], [1]]}, "stop_words_list: not with a beam_width"),
        ({"beam_width": [2], "temperature": [0.5]}, "temperature: not with a beam_width above 1"),
        ({"beam_width": [2], "runtime_top_p": [0.5]}, "runtime_top_p: not with a beam_width above 1"),
        ({"lora_task_id": [1]}, "lora_task_id: the embedded engine has it only on CPUs"),
        ({"lora_weights": [[1.0]]}, "lora_weights: the embedded engine has it only on CPUs"),
        ({"runtime_top_p_decay": [0.5]}, "runtime_top_p_decay: the embedded engine"),
        ({"repetition_penalty": [0.0]}, "repetition_penalty 0: must be above 0"),
        ({"repetition_penalty": [np.nan]}, "repetition_penalty nan: must be from"),
        ({"presence_penalty": [-np.inf]}, "presence_penalty -inf: must be from"),
        ({"embedding_bias": [np.nan, 0.0]}, "embedding_bias: must be numbers below infinity"),
        ({"temperature": [-0.5]}, "temperature -0.5: must be from 0 to"),
        ({"temperature": [np.nan]}, "temperature nan: must be from 0 to"),
        ({"min_tokens": [-1]}, "min_tokens -1: must be from 0 to"),
        ({"min_tokens": [1 << 40]}, r"min_tokens 1.09951e\+12: must be from 0 to"),
        ({"beam_width": [2], "len_penalty": [1100.0]}, "len_penalty 1100: must be from -30 to 30"),
        ({"beam_width": [2], "len_penalty": [-1100.0]}, "len_penalty -1100: must be from -30 to 30"),
        ({"request_output_len": [1 << 40]}, r"request_output_len 1.09951e\+12: must be from 1 to"),
        ({"input_lengths": [-1]}, "input_lengths: must be at least 1"),
        ({"request_output_len": [0]}, "request_output_len 0: must be at least 1"),
        ({"input_lengths": [0]}, "input_lengths: must be at least 1"),
        ({"input_lengths": [5]}, "input_lengths 5: there are 4 input_ids"),
        ({"input_ids": []}, "input_ids: it is missing or empty"),
        ({"stop_words_list": [[7], [2]]}, "a list of words ends one at 2, of 1 tokens"),
        ({"stop_words_list": [7, 1]}, r"has the shape \[2\]: expected \[2, n\]"),
    ],
)
def test_wrong_values_are_refused(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}|{message}"):
        request_of(**tensors)


def test_a_bias_that_forbids_a_token() -> None:
    extras = request_of(embedding_bias=[0.0, -np.inf]).extras
    assert extras is not None and extras.bias is not None and extras.bias.tolist() == [0, -np.inf]


def test_weights_without_an_id_are_of_their_request() -> None:
    """As the README of the backend sends them: --lora-path alone."""
    adapter, found = Adapter.__new__(Adapter), []

    def find(task_id: int, weights: Any, config: Any) -> Adapter:
        found.append((task_id, weights.tolist(), config.tolist()))
        return adapter

    tensors = {**BASE, "lora_weights": [[1.0, 2.0]], "lora_config": [[1, 0, 1]]}
    arrays = {name: np.array(value) for name, value in tensors.items()}
    extras = read(arrays, exclude_input=False, find_adapter=find).extras
    assert extras is not None and extras.adapter is adapter
    assert found == [(0, [[1.0, 2.0]], [[1, 0, 1]])]


def test_rare_values_are_read() -> None:
    extras = request_of(
        temperature=[0.5],
        presence_penalty=[1.0],
        frequency_penalty=[2.0],
        repetition_penalty=[1.5],
        bad_words_list=[[7, 8, 9], [1, 3, -1]],
        embedding_bias=[0.0, 1.0],
        return_context_logits=[True],
        return_generation_logits=[False],
        min_tokens=[2],
        end_id=[3],
    ).extras
    assert extras is not None and extras.bias is not None and extras.bias.tolist() == [0, 1]
    penalties = extras.repetition_penalty, extras.presence_penalty, extras.frequency_penalty
    assert penalties == (1.5, 0.5, 1.0), "presence and frequency count after the temperature"
    assert extras.bad_words == ((7,), (8, 9)) and extras.not_yet == (3,)
    assert (extras.keeps_context_logits, extras.keeps_generation_logits) == (True, False)


@pytest.mark.parametrize(
    "tensors",
    [
        {"bad_words_list": [[7], [1]]},
        {"return_generation_logits": [True]},
        {"embedding_bias": [0.0, 1.0]},
        {"frequency_penalty": [0.5]},
    ],
)
def test_an_engine_that_can_not(tensors: dict[str, Any]) -> None:
    """An engine of several stages refuses them by the tensor's name."""
    values = {name: np.array(value) for name, value in {**BASE, **tensors}.items()}
    with pytest.raises(
        RequestError, match=f"^{next(iter(tensors))}: the embedded engine has it only without"
    ):
        read(values, exclude_input=False, takes_extras=False)


def test_words_there_and_back() -> None:
    words = ((7,), (8, 9), (10, 11, 12))
    assert word_list(list_of_words(words)) == words
