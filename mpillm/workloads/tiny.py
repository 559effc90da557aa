"""``--model_scale tiny``: a workload small enough for any machine, through the code of the full one.

The model is a preset with random weights, the data set is made, in the published format, and LoadGen's sample count and duration are
reduced through settings that it records. Everything else is the benchmark's: LoadGen's name of the model and so its latency limits, the
loader, the end and stop tokens' handling, the columns.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mpillm import fields
from mpillm.workloads import Workload

_SAMPLES = 512  # one sample for so many
_PROMPT_TOKENS = {"llama2-70b": 16, "mixtral-8x7b": 16, "llama3.1-405b": 64}  # one for so many
_ANSWER_TOKENS = 64  # one for so many
_VOCAB_SIZE, _END_ID = 512, 257  # of the presets tiny-llama and tiny-mixtral
_PLAIN_TOKENS = 256  # below the presets' special ones
_QPS = 10.0
_QUERIES = 500  # LoadGen's early stopping needs 458 to be sure of a 99th percentile
_TEXTS = {
    "dataset": ("OpenOrca", "GSM8K", "MBXP"),
    "metric": ("rouge", "niah_em", "qa_em"),
    "id": ("flan.1", "train.1", "python_add"),
    "input": ("Name three fruits.", "What is 2 + 3?", "def add(a, b):"),
}


def tiny(workload: Workload) -> Workload:
    """`workload` scaled down; its `scaled` says to what, and its data set is to be made by `write_dataset`."""
    model = "tiny-mixtral" if workload.stop_words else "tiny-llama"
    small = replace(
        workload,
        model_path=model,
        tensor_parallelism=1,
        dataset_path="",
        n_samples=workload.n_samples // _SAMPLES,
        max_input_len=workload.max_input_len // _PROMPT_TOKENS[workload.name.removesuffix("-interactive")],
        max_output_len=workload.max_output_len // _ANSWER_TOKENS,
        end_ids=(_END_ID,),
        stop_words=tuple(tuple(token % _VOCAB_SIZE for token in word) for word in workload.stop_words),
        options={
            scenario: {fields.min_duration: 0.0, **loadgen}
            for scenario, loadgen in (
                ("Offline", {fields.min_query_count: workload.n_samples // _SAMPLES}),
                ("Server", {fields.min_query_count: _QUERIES, fields.server_target_qps: _QPS}),
            )
        },
    )
    return replace(
        small,
        scaled=f"model {model} with random weights for {workload.hf_model}, {small.n_samples} made samples for {workload.n_samples},"
        f" prompts to {small.max_input_len} tokens for {workload.max_input_len}, answers to {small.max_output_len} for"
        f" {workload.max_output_len}, token ids below {_VOCAB_SIZE}; LoadGen: performance_sample_count, min_query_count, min_duration",
    )


def write_dataset(workload: Workload, folder: Path) -> None:
    """The scaled-down data set of a workload: its data frame, with the published name and columns, always the same."""
    import numpy as np

    from mpillm.preprocessed.write import write_frame

    random = np.random.default_rng(workload.n_samples)
    n, columns = workload.n_samples, workload.columns
    mean = workload.max_input_len / 3.5  # about where the published prompts' mean is
    lengths = np.clip(random.normal(mean, mean / 2, n).round(), 1, workload.max_input_len).astype(np.int64)
    lengths[0] = workload.max_input_len
    made: dict[str, Any] = {
        name: [_TEXTS.get(name, ("1. Apples 2. Pears 3. Plums", "5", "return a + b"))[i % 3] for i in range(n)]
        for name in columns.references
    }
    made[columns.tokens] = [random.integers(0, _PLAIN_TOKENS, length).tolist() for length in lengths]
    if columns.lengths:
        made[columns.lengths] = lengths
    if columns.stop_words:
        words = ((_END_ID,), (_END_ID,), *workload.stop_words)  # MBXP's, as `_TEXTS` has it, are every third
        made[columns.stop_words] = [list(words[i % 3]) for i in range(n)]
    folder.mkdir(parents=True, exist_ok=True)
    write_frame(folder / workload.frame_file, made)
