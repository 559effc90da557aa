"""How to generate answers."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.parsers import fraction, natural, not_negative, positive, token_ids
from mpillm.configurator.parsers import stop_words as words
from mpillm.fields.effects import COMPUTING, used_by


class GenerationFields(Options):
    """How to generate answers."""

    max_output_len = Field(
        "max_output_len",
        "maximum tokens of an answer, the end token included",
        positive,
        default=128,
        group="generation",
    )
    min_output_len = Field(
        "min_output_len",
        "tokens before which no end token or stop word ends an answer",
        natural,
        default=0,
        group="generation",
    )
    end_ids = Field(
        "end_ids", "token ids that end an answer [default: the model's]", token_ids, group="generation"
    )
    stop_words = Field(
        "stop_words",
        "an answer ends after any of these: one word, or a JSON array of words and of token ids,"
        ' as ["###", [13, 13]]',
        words,
        group="generation",
    )
    beam_width = Field(
        "beam_width",
        "beams of a search; with mpillm's own engine only requests to Triton may ask for more than 1",
        positive,
        default=1,
        effect=used_by(*COMPUTING),
        group="generation",
    )
    temperature = Field("temperature", "0 is greedy", not_negative, default=0.0, group="generation")
    top_k = Field(
        "top_k", "sample from the k likeliest tokens; 0: from all", natural, default=0, group="generation"
    )
    top_p = Field(
        "top_p",
        "sample from the likeliest tokens that together have this probability",
        fraction,
        default=1.0,
        group="generation",
    )
    seed = Field("seed", "seed of sampling and of synthetic data", natural, default=0, group="generation")
