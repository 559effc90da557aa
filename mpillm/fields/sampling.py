"""How to generate answers."""

from __future__ import annotations

from mpillm.configurator import Options, option
from mpillm.configurator.parsers import fraction, natural, not_negative, positive, token_ids
from mpillm.configurator.parsers import stop_words as words
from mpillm.fields.effects import COMPUTING, used_by


class GenerationFields(Options, group="generation"):
    """How to generate answers."""

    max_output_len = option("maximum tokens of an answer, the end token included", positive, default=128)
    min_output_len = option(
        "tokens before which no end token or stop word ends an answer", natural, default=0
    )
    end_ids = option("token ids that end an answer [default: the model's]", token_ids)
    stop_words = option(
        "an answer ends after any of these: one word, or a JSON array of words and of token ids,"
        ' as ["###", [13, 13]]',
        words,
    )
    beam_width = option(
        "beams of a search; with mpillm's own engine only requests to Triton may ask for more than 1",
        positive,
        default=1,
        effect=used_by(*COMPUTING),
    )
    temperature = option("0 is greedy", not_negative, default=0.0)
    top_k = option("sample from the k likeliest tokens; 0: from all", natural, default=0)
    top_p = option(
        "sample from the likeliest tokens that together have this probability", fraction, default=1.0
    )
    seed = option("seed of sampling and of synthetic data", natural, default=0)
