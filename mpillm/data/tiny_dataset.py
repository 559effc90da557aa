"""Writes the data set of ``--model_scale tiny``, in the published format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mpillm.data.preprocessed.loader import LENGTHS_FILE, STOP_FILE, TOKENS_FILE
from mpillm.workloads import Workload

DATASET, REFERENCES = "dataset", "references.jsonl"  # a folder in the run directory, and a file in it

_PLAIN_TOKENS = 256  # the tiny presets' special tokens have higher ids
_ANSWERS = ("1. Apples 2. Pears 3. Plums", "5", "return a + b")
_TEXTS = {
    "dataset": ("OpenOrca", "GSM8K", "MBXP"),
    "metric": ("rouge", "niah_em", "qa_em"),
    "id": ("flan.1", "train.1", "python_add"),
    "input": ("Name three fruits.", "What is 2 + 3?", "def add(a, b):"),
}


def write_dataset(workload: Workload, folder: Path) -> None:
    """Write the scaled-down data set: NVIDIA's arrays, and `REFERENCES` for scores. It is deterministic."""
    random = np.random.default_rng(workload.n_samples)
    n, width, (end_id,) = workload.n_samples, workload.max_input_len, workload.end_ids
    mean = width / 3.5  # similar to the published data sets
    lengths = np.clip(random.normal(mean, mean / 2, n).round(), 1, width).astype(np.int32)
    lengths[0] = width
    tokens = random.integers(0, _PLAIN_TOKENS, (n, width), np.int32)
    tokens[np.arange(width) >= lengths[:, None]] = end_id
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / TOKENS_FILE, tokens)
    np.save(folder / LENGTHS_FILE, lengths)
    for word in workload.stop_words:
        stops = np.full((n, len(word)), end_id, np.int32)
        stops[2::3] = word  # samples from MBXP, the third entry of `_TEXTS`
        np.save(folder / STOP_FILE, stops)
    with (folder / REFERENCES).open("w", encoding="utf-8") as stream:
        for i in range(n):
            texts = {name: _TEXTS.get(name, _ANSWERS)[i % 3] for name in workload.columns.references}
            stream.write(json.dumps(texts) + "\n")
