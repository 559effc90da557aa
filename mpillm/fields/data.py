"""The data set."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.parsers import at_least_one, boolean, name_or_class, not_negative, positive
from mpillm.fields.effects import SYNTHETIC, TEST


class DataFields(Options):
    """The data set."""

    dataset_path = Field(
        "dataset_path",
        'JSONL with {"prompt": …} or {"input_tokens": […]} per line; or a published data set:'
        " the folder with input_ids_padded.npy, or a data frame, .pkl or .pkl.gz"
        " (docs/reference/workloads.md) [default: the workload's, or the prompts that come with mpillm]",
        effect=TEST,
        group="data",
        aliases=("tensor_path",),
    )
    dataset = Field(
        "dataset",
        "prompts: those of dataset_path; synthetic: random tokens of given lengths;"
        " or an LLMDataLoader of your own as package.module:Class",
        name_or_class(("prompts", "synthetic")),
        default="prompts",
        effect=TEST,
        group="data",
    )
    num_samples = Field(
        "num_samples",
        "size of the synthetic data set",
        positive,
        default=1024,
        effect=SYNTHETIC,
        group="data",
    )
    input_mean = Field(
        "input_mean",
        "synthetic: mean prompt length, tokens",
        at_least_one,
        default=128.0,
        effect=SYNTHETIC,
        group="data",
    )
    input_stdev = Field(
        "input_stdev",
        "synthetic: its standard deviation",
        not_negative,
        default=0.0,
        effect=SYNTHETIC,
        group="data",
    )
    output_mean = Field(
        "output_mean",
        "synthetic: mean answer length, tokens",
        at_least_one,
        default=32.0,
        effect=SYNTHETIC,
        group="data",
    )
    output_stdev = Field(
        "output_stdev",
        "synthetic: its standard deviation",
        not_negative,
        default=0.0,
        effect=SYNTHETIC,
        group="data",
    )
    apply_chat_template = Field(
        "apply_chat_template",
        "wrap prompts in the model's chat template, if it has one",
        boolean,
        default=True,
        group="data",
    )
