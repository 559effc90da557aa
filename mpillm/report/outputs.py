"""The answers: all in `outputs.jsonl`, the first few on the console."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpillm.data.dataset import Dataset
from mpillm.data.tokenizer import NoTokenizer, Tokenizer
from mpillm.files import naming

N_CONSOLE = 3


class Outputs:
    """Writes each answer as it arrives; keeps only the first few in memory, for the console."""

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, path: Path | None) -> None:
        """`path`: file for a line per answer, or None."""
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._path = path
        # Written line by line: users may read the file during the test, and the run may be killed.
        self._file = path.open("w", buffering=1, encoding="utf-8") if path else None
        self._first: dict[int, NDArray[np.int32]] = {}

    def add(self, index: int, tokens: NDArray[np.int32], prompt: NDArray[np.int32] | None = None) -> None:
        """Take the answer to the sample at `index`. Raises OSError if the disk is full.

        `prompt`: its tokens; None: those in the data set.
        """
        if index not in self._first and (len(self._first) < N_CONSOLE or index < max(self._first)):
            if len(self._first) == N_CONSOLE:
                del self._first[max(self._first)]
            self._first[index] = tokens.copy()
        if self._file is not None:
            line: dict[str, Any] = {
                "index": index,
                "input_tokens": (self._dataset.sample(index) if prompt is None else prompt).tolist(),
                "output_tokens": tokens.tolist(),
            }
            if (turns := self._dataset.turns) is not None:
                number = int(np.searchsorted(turns.first, index, "right")) - 1
                conversation = turns.conversations[number]
                line["conversation"] = conversation.name
                line["turn"] = index - int(turns.first[number])
                if conversation.parent is not None:
                    line["parent"] = conversation.parent.name
            if not isinstance(self._tokenizer, NoTokenizer):
                line["text"] = self._tokenizer.decode(tokens)
            with naming(self._path):
                self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def first_outputs(self) -> list[tuple[int, str, str]]:
        """Return (index, prompt, answer) of the first few, by index."""
        return [
            (index, self._prompt(index), self._tokenizer.decode(tokens))
            for index, tokens in sorted(self._first.items())
        ]

    def _prompt(self, index: int) -> str:
        text = self._dataset.texts.get(index)
        return self._tokenizer.decode(self._dataset.sample(index)) if text is None else text

    def close(self) -> None:
        """Write out what is buffered. Raises OSError if the disk is full."""
        if self._file is not None:
            with naming(self._path):
                self._file.close()
