"""A GGUF file of each family answers as transformers' model does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpillm.data.gguf import convert
from mpillm.data.gguf_config import ARCHITECTURES
from tests.helpers.families import make_family
from tests.helpers.gguf_files import GGUF_ARCHITECTURES, write_family
from tests.helpers.oracle import Oracle
from tests.helpers.torch_cores import answer, make_batch, make_core

pytest.importorskip("transformers")

PROMPTS = [[5, 6, 7], [100 + i for i in range(40)], [9]]


@pytest.mark.long
@pytest.mark.parametrize("name", GGUF_ARCHITECTURES)
def test_a_family(tmp_path: Path, name: str) -> None:
    more: dict[str, int] = {"use_sliding_window": False} if name == "Qwen2ForCausalLM" else {}
    more |= {"query_pre_attn_scalar": 16} if name == "Gemma3ForCausalLM" else {}
    model = make_family(name, tmp_path / "hf", **more)
    write_family(tmp_path / "m.gguf", model)
    (folder := tmp_path / "made").mkdir()
    convert(tmp_path / "m.gguf", folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [name]
    oracle = Oracle(tmp_path / "hf")
    found = answer(make_core(folder, dtype="float32"), make_batch(PROMPTS, max_output=8))
    assert found == [oracle.tokens(prompt, 8) for prompt in PROMPTS]


def test_the_page_names_the_architectures() -> None:
    names = [f"`{name}`" for name in ARCHITECTURES]
    assert f"{', '.join(names[:-1])} and {names[-1]}" in Path("docs/reference/tested.md").read_text()
