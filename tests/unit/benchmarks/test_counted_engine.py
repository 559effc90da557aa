"""What `benchmarks engine` counts as the engine's products is all that a layer multiplies."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.counted_engine import CountedEngine
from mpillm.engine.shape.model_info import check_model
from tests.helpers.engine_configs import engine_config
from tests.helpers.families import SHAPE, make_family

HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS, VOCABULARY = (
    SHAPE[name]
    for name in (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "vocab_size",
    )
)


def engine(family: str, folder: Path) -> CountedEngine:
    make_family(family, folder)
    core = engine_config(folder, dtype="float32", n_threads=1)
    return CountedEngine(core, check_model(core))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "mlp"), [("Qwen3ForCausalLM", 3 * 96), ("Qwen3MoeForCausalLM", 3 * 3 * 48 + 8)]
)
def test_operations(family: str, mlp: int, tmp_path: Path) -> None:
    """`mlp`: its products' columns of all experts that a row chooses, and the router's."""
    counted = engine(family, tmp_path)
    counted.answer([[5, 6, 7, 8]], 2)  # steps of four rows and of one, each with one row of logits
    attention = HIDDEN * ((HEADS + 2 * KV_HEADS) * HEAD), HEADS * HEAD * HIDDEN
    rows, wanted = 5, 2
    of_rows = LAYERS * attention[0] + (LAYERS - 1) * (attention[1] + HIDDEN * mlp)
    of_wanted = attention[1] + HIDDEN * mlp + HIDDEN * VOCABULARY
    assert counted.n_operations() == 2 * (rows * of_rows + wanted * of_wanted)
    assert counted.products() > 0


@pytest.mark.long
def test_unknown_layers_are_not_counted(tmp_path: Path) -> None:
    counted = engine("DeepseekV3ForCausalLM", tmp_path)
    counted.answer([[5, 6, 7, 8]], 2)
    assert counted.n_operations() == 0
