"""``--model_scale tiny``: a workload small enough for any machine, run by the code of the full one.

The model is a preset with random weights; the data set is generated, in the published format; LoadGen's
sample count and duration are reduced through settings that it records. Everything else is the benchmark's:
LoadGen's name of the model and so its latency limits, the loader, the handling of end and stop tokens, the
columns.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from mpillm import fields
from mpillm.workloads.benchmarks import Workload
from mpillm.workloads.early_stopping import SERVER_PERCENTILE, queries_needed

DATASET, REFERENCES = "dataset", "references.jsonl"  # a folder in the run directory, and a file in it

# Divisors.
_SAMPLES = 512
_PROMPT_TOKENS = {"llama2-70b": 16, "mixtral-8x7b": 16, "llama3.1-405b": 64}
_ANSWER_TOKENS = 64
_VOCAB_SIZE, _END_ID = 512, 257  # of the presets tiny-llama and tiny-mixtral
_PLAIN_TOKENS = 256  # below the presets' special ones
_QPS = 10.0
_QUERIES = queries_needed(SERVER_PERCENTILE)
_ANSWERS = ("1. Apples 2. Pears 3. Plums", "5", "return a + b")
_TEXTS = {
    "dataset": ("OpenOrca", "GSM8K", "MBXP"),
    "metric": ("rouge", "niah_em", "qa_em"),
    "id": ("flan.1", "train.1", "python_add"),
    "input": ("Name three fruits.", "What is 2 + 3?", "def add(a, b):"),
}


def tiny(workload: Workload) -> Workload:
    """Return `workload` scaled down, as its `scaled` says; `write_dataset` makes its data set."""
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
        scaled=f"model {model} with random weights instead of {workload.hf_model},"
        f" {small.n_samples} made samples instead of {workload.n_samples},"
        f" prompts to {small.max_input_len} tokens instead of {workload.max_input_len},"
        f" answers to {small.max_output_len} instead of {workload.max_output_len},"
        f" token ids below {_VOCAB_SIZE};"
        " LoadGen: performance_sample_count, min_query_count, min_duration",
    )


def write_dataset(workload: Workload, folder: Path) -> None:
    """Write the scaled-down data set, always the same: NVIDIA's arrays, and `REFERENCES` for scores."""
    import numpy as np

    from mpillm.data.preprocessed.loader import LENGTHS_FILE, STOP_FILE, TOKENS_FILE

    random = np.random.default_rng(workload.n_samples)
    n, width = workload.n_samples, workload.max_input_len
    mean = width / 3.5  # roughly as in the published data sets
    lengths = np.clip(random.normal(mean, mean / 2, n).round(), 1, width).astype(np.int32)
    lengths[0] = width
    tokens = random.integers(0, _PLAIN_TOKENS, (n, width), np.int32)
    tokens[np.arange(width) >= lengths[:, None]] = _END_ID
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / TOKENS_FILE, tokens)
    np.save(folder / LENGTHS_FILE, lengths)
    for word in workload.stop_words:
        stops = np.full((n, len(word)), _END_ID, np.int32)
        stops[2::3] = word  # MBXP's samples, as `_TEXTS` has them
        np.save(folder / STOP_FILE, stops)
    with (folder / REFERENCES).open("w", encoding="utf-8") as stream:
        for i in range(n):
            texts = {name: _TEXTS.get(name, _ANSWERS)[i % 3] for name in workload.columns.references}
            stream.write(json.dumps(texts) + "\n")
