"""Counts of the requests that one client sent to one server in a test, and of their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mpillm.cores.openai_client.answer import AnswerError, CompletionResponse
from mpillm.cores.openai_client.dialect import Dialect, Sampling

COUNTED = ("retokenized", "other_prompt_length", "other_answer_length", "other_text_length", "short_answers")
_MAX_NAME = 200  # characters of a model's name


class Request(Protocol):
    """A request with its answer, as the tally reads them."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def answer(self) -> CompletionResponse: ...

    @property
    def handoff_params(self) -> Mapping[str, Any] | None: ...  # from a context server

    @property
    def model(self) -> str: ...  # that it names; "": the server's only model


class ServerTally:
    """Counts of one server's answers to one client."""

    def __init__(self, strict_model: bool = False) -> None:
        """`strict_model`: an answer of another model than the requested model is an error."""
        self._strict_model = strict_model
        self.clear()

    def clear(self) -> None:
        """Start at 0, before a test."""
        self.answers = 0
        self.prompt_tokens = self.generated_tokens = 0  # of these answers, by the server's definition
        self.uncounted = 0  # answers with text only, without the server's token counts
        self.lost_prompt_tokens = self.lost_tokens = 0  # upper limits for requests without an answer
        self.handed_over = 0  # answers to requests with a KV cache of a context server
        self.other_model, self.other_models = "", 0  # an unrequested name in answers; number of such answers
        self.cut_answers = 0
        self.counts = dict.fromkeys(COUNTED, 0)
        self.by_model = Counter[str]()  # answers to requests that name one of several models

    def add(self, request: Request, dialect: Dialect, model: str, n_tokens: int | None) -> None:
        """Count an answer.

        `model`: the requested model. `n_tokens`: tokens of the complete answer; None for a context server's
        answer whose KV cache goes to another server. Raises AnswerError if another model has answered, and
        `strict_model` is set.
        """
        answer, sampling, counts = request.answer, request.sampling, self.counts
        self._check_model(answer.models, model)
        n_prompt = len(request.prompt) if dialect.token_prompts else answer.prompt_tokens
        n_generated = len(answer.tokens) if dialect.token_ids else answer.completion_tokens
        self.answers += 1
        if request.model:
            self.by_model[request.model] += 1
        self.uncounted += n_prompt is None or n_generated is None
        self.prompt_tokens += n_prompt or 0
        self.generated_tokens += n_generated or 0
        if n_tokens is None:
            return
        self.handed_over += request.handoff_params is not None
        is_other = answer.completion_tokens not in (None, n_tokens)
        if dialect.token_ids:
            counts["other_answer_length"] += is_other
        elif not dialect.sends_text:
            counts["retokenized"] += 1
            counts["other_text_length"] += is_other
        if dialect.token_ids and not dialect.sends_text:
            counts["other_prompt_length"] += answer.prompt_tokens not in (None, len(request.prompt))
        if n_generated is not None:
            min_tokens = sampling.max_tokens if sampling.ignore_eos else sampling.min_tokens
            counts["short_answers"] += n_generated < min_tokens
            self.cut_answers += answer.finish_reason == "length" and n_generated < sampling.max_tokens

    def _check_model(self, names: set[str], requested: str) -> None:
        # `transformers serve` appends a revision to the name.
        others = [name for name in names if name != requested and not name.startswith(f"{requested}@")]
        if not others:
            return
        self.other_model = self.other_model or others[0][:_MAX_NAME]
        self.other_models += 1
        if self._strict_model:
            raise AnswerError(f"it answers with the model {self.other_model}, not {requested} as requested")

    def lose(self, request: Request) -> None:
        """Count a request that the server may have begun, and whose answer does not arrive."""
        self.lost_prompt_tokens += len(request.prompt)
        self.lost_tokens += request.sampling.max_tokens

    def values(self) -> dict[str, Any]:
        """Return the counts for `result.json`; None: not known."""
        known = not self.uncounted
        return {
            "answers": self.answers,
            "prompt_tokens": self.prompt_tokens if known else None,
            "generated_tokens": self.generated_tokens if known else None,
            "lost_prompt_tokens": self.lost_prompt_tokens,
            "lost_tokens": self.lost_tokens,
            "handed_over": self.handed_over,
            "other_model": self.other_model,
            "other_models": self.other_models,
            "cut_answers": self.cut_answers,
            **self.counts,
            **({"answers_by_model": dict(self.by_model)} if self.by_model else {}),
        }
