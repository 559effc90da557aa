"""Logits of every family equal those of transformers but for the error of float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpillm.engine.model.families import FAMILIES
from mpillm.engine.special import Special
from tests.helpers.families import make_family
from tests.helpers.oracle import Oracle
from tests.helpers.torch_cores import answer_specials, make_core

pytest.importorskip("transformers")

PROMPTS = [[5, 6, 7], [100 + i for i in range(40)], [9]]  # one is longer than windows
N_OUTPUT = 9


@pytest.mark.parametrize("options", [{}, {"max_num_tokens": 16}], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Behind each token of prompts and of their answers."""
    make_family(name, tmp_path)
    oracle = Oracle(tmp_path)
    specials = [Special(keeps_context_logits=True, keeps_generation_logits=True) for _ in PROMPTS]
    core = make_core(tmp_path, dtype="float32", **options)
    answers = answer_specials(core, PROMPTS, dict(enumerate(specials)), N_OUTPUT)
    for prompt, answer, special in zip(PROMPTS, answers, specials, strict=True):
        expected = oracle.logits(prompt + answer)[:-1]
        found = np.concatenate([*special.context_logits, np.stack(special.generation_logits)[1:]])
        assert found.shape == tuple(expected.shape)
        assert (torch.from_numpy(found) - expected).norm() < 1e-5 * expected.norm()
