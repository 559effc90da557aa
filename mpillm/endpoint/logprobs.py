"""Convert the numbers that come with an answer's tokens to OpenAI's log probabilities.

The probabilities are the model's, before temperature, top-k, top-p and forbidden end tokens, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpillm.data.tokenizer import Tokenizer
from mpillm.endpoint.api_error import Json

_MIN_LOGPROB = -9999.0  # also for the logarithm of 0: JSON has no infinity


class TokenLogprobs(NamedTuple):
    """The log probabilities of one token of an answer."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens, the likeliest first


def read(token: int, numbers: Sequence[int]) -> TokenLogprobs:
    """Read a token's numbers (see `ResponseFlag.LOGPROBS`)."""
    n = len(numbers) // 2
    values = np.array([numbers[0], *numbers[1 + n :]], np.int32).view(np.float32)
    logprob, *top = np.maximum(values, _MIN_LOGPROB).tolist()
    return TokenLogprobs(token, logprob, list(zip(numbers[1 : 1 + n], top, strict=True)))


def completion(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, offset: int, *, as_ids: bool) -> Json:
    """Return the `logprobs` of a text completion. `offset`: characters of the previous tokens.

    `as_ids`: see `_name_of`.
    """
    result: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for entry in entries:
        text = _name_of(entry.token, tokenizer, as_ids)
        result["text_offset"].append(offset)
        result["token_logprobs"].append(entry.logprob)
        result["tokens"].append(text)
        top = {_name_of(token, tokenizer, as_ids): logprob for token, logprob in reversed(entry.top)}
        # If two tokens have the same text, the likelier one is returned. The chosen token always is returned.
        result["top_logprobs"].append(dict(reversed(top.items())) | {text: entry.logprob})
        offset += len(text)
    return result


def chat(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, *, as_ids: bool) -> Json:
    """Return the `logprobs` of a chat's message. `as_ids`: see `_name_of`."""

    def one(token: int, logprob: float) -> Json:
        name = _name_of(token, tokenizer, as_ids)
        return {"token": name, "logprob": logprob, "bytes": list(text_of(token, tokenizer).encode())}

    return {
        "content": [
            one(entry.token, entry.logprob) | {"top_logprobs": [one(*other) for other in entry.top]}
            for entry in entries
        ]
    }


def _name_of(token: int, tokenizer: Tokenizer, as_ids: bool) -> str:
    """Return a token's text or, with `as_ids`, its number ("token_id:5"), because texts are ambiguous."""
    return f"token_id:{token}" if as_ids else text_of(token, tokenizer)


def text_of(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a token by itself: U+FFFD if it is a part of a character."""
    return tokenizer.decode([token], keep_special=True)
