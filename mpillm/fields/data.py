"""The data set."""

from __future__ import annotations

from mpillm.configurator import Options, option
from mpillm.configurator.effect import EVERYWHERE
from mpillm.configurator.parsers import at_least_one, boolean, name_or_class, not_negative, positive
from mpillm.fields.effects import SYNTHETIC, TEST


class DataFields(Options, group="data", effect=SYNTHETIC):
    """The data set."""

    dataset_path = option(
        'JSONL with {"prompt": …} or {"input_tokens": […]} per line; or a published data set:'
        " the folder with input_ids_padded.npy, or a data frame, .pkl or .pkl.gz"
        " (docs/reference/workloads.md) [default: the workload's, or the prompts that come with mpillm]",
        effect=TEST,
        aliases=("tensor_path",),
    )
    dataset = option(
        "prompts: those of dataset_path; synthetic: random tokens of given lengths;"
        " or an LLMDataLoader of your own as package.module:Class",
        name_or_class(("prompts", "synthetic")),
        default="prompts",
        effect=TEST,
    )
    num_samples = option("size of the synthetic data set", positive, default=1024)
    input_mean = option("synthetic: mean prompt length, tokens", at_least_one, default=128.0)
    input_stdev = option("synthetic: its standard deviation", not_negative, default=0.0)
    output_mean = option("synthetic: mean answer length, tokens", at_least_one, default=32.0)
    output_stdev = option("synthetic: its standard deviation", not_negative, default=0.0)
    apply_chat_template = option(
        "wrap prompts in the model's chat template, if it has one", boolean, default=True, effect=EVERYWHERE
    )
