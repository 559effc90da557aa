"""The data set, and how answers are generated."""

from __future__ import annotations

from mpillm.options.field import ANY, EVERYWHERE, Effect, Options, Use, option
from mpillm.options.fields.effects import COMPUTING, RUN, SYNTHETIC, TEST, of_engines
from mpillm.options.parsers import (
    boolean,
    fraction,
    name_or_class,
    natural,
    not_negative,
    one_or_more,
    positive,
    token_ids,
)
from mpillm.options.parsers import stop_words as parse_stop_words


class DataFields(Options, group="data", effect=SYNTHETIC):
    """The data set."""

    dataset_path = option(
        'JSONL with {"prompt": …}, {"input_tokens": […]} or {"messages": […]} per line, OpenAI batches, CSV,'
        " text, Parquet or Arrow, packed or not; or a published data set:"
        " the folder with input_ids_padded.npy, or a data frame, .pkl, .pkl.gz or .parquet"
        " (docs/reference/workloads.md) [default: the workload's, or the prompts that come with mpillm]",
        effect=TEST,
        aliases=("tensor_path",),
    )
    prompt_column = option(
        "the field of dataset_path's rows that holds the prompt, as text, token ids or messages"
        " [default: prompt, input_tokens, messages or text]",
        effect=TEST,
    )
    output_len_column = option(
        "the field of dataset_path's rows that holds the tokens of the answer, at most max_output_len"
        " [default: output_tokens, output_tokens_count, output_length, max_tokens, …]",
        effect=TEST,
    )
    dataset = option(
        "prompts: from dataset_path; synthetic: random tokens of given lengths,"
        " or an LLMDataLoader of your own as package.module:Class",
        name_or_class(("prompts", "synthetic")),
        default="prompts",
        effect=TEST,
    )
    num_samples = option("size of the synthetic data set", positive, default=1024)
    input_mean = option("synthetic: mean prompt length, tokens", one_or_more, default=128.0)
    input_stdev = option("synthetic: its standard deviation", not_negative, default=0.0)
    output_mean = option("synthetic: mean answer length, tokens", one_or_more, default=32.0)
    output_stdev = option("synthetic: its standard deviation", not_negative, default=0.0)
    synthetic_text = option(
        "take the prompts of synthetic data from the text in this file, in place of random tokens",
        effect=Effect((*SYNTHETIC.uses, Use((RUN,), needs=("synthetic_conversations", ANY)))),
    )
    apply_chat_template = option(
        "wrap prompts in the model's chat template, if it has one", boolean, default=True, effect=EVERYWHERE
    )


class GenerationFields(Options, group="generation"):
    """How to generate answers."""

    max_output_len = option("maximum tokens of an answer, the end token included", positive, default=128)
    min_output_len = option(
        "tokens before which no end token or stop word ends an answer", natural, default=0
    )
    end_ids = option("token ids that end an answer [default: the model's]", token_ids)
    stop_words = option(
        "an answer ends after any of these: one word, or a JSON array of words and of token ids,"
        ' such as ["###", [13, 13]]. The embedded engine compares tokens: a word stands for the tokens that'
        " the tokenizer makes of it alone",
        parse_stop_words,
    )
    beam_width = option(
        "beams of a search; with mpillm's own engine only requests to Triton may have more than 1",
        positive,
        default=1,
        effect=of_engines(*COMPUTING),
    )
    temperature = option("0 is greedy", not_negative, default=0.0)
    top_k = option("sample from the k likeliest tokens; 0: from all", natural, default=0)
    top_p = option(
        "sample from the likeliest tokens that together have this probability", fraction, default=1.0
    )
    seed = option("seed of sampling and of synthetic data", natural, default=0)
