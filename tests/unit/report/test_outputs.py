"""The answers of a test, as they are written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mpillm.data.dataset import Dataset
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.report.outputs import Outputs


def test_an_answer_is_in_the_file_at_once(tmp_path: Path) -> None:
    """Somebody may look at it, and the run may be killed."""
    path = tmp_path / "outputs.jsonl"
    outputs = Outputs(
        Dataset.packed("one", np.array([65, 66], np.int32), np.array([2])), ByteTokenizer(), path
    )
    outputs.add(0, np.array([67], np.int32))
    written = [json.loads(line) for line in path.read_text().splitlines()]
    outputs.close()
    assert written == [{"index": 0, "input_tokens": [65, 66], "output_tokens": [67], "text": "C"}]
