"""Which cases the self test makes of options, without running them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpillm.experiments.selftest import CaseBuilder, cases, option_named


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, 2),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 3),
        ({"num_attention_heads": 8, "num_key_value_heads": 1}, 2),
        ({"num_attention_heads": 15}, 3),
        ({"text_config": {"num_attention_heads": 5, "num_key_value_heads": 5}}, 5),
        ({"num_attention_heads": "many"}, 2),
        ({}, 2),
    ],
)
@pytest.mark.parametrize("server", ["vllm", ""])
def test_a_tensor_parallel_size_that_the_model_can_be_cut_into(
    config: dict[str, Any], size: int, server: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model_path", str(tmp_path), *(["--server", server] if server else ["--core_type", "dummy"])]
    found = {step.name: step for step in cases(CaseBuilder(words, (), tmp_path / "runs", 60.0))}
    (name,) = (name for name in found if name.startswith("TP"))
    argv = found[name].argv
    assert name == f"TP {size}" and argv[argv.index("--tensor_parallelism") + 1] == str(size)
    assert argv[argv.index("-n") + 1] == ("2" if server else str(1 + size))


@pytest.mark.parametrize(
    ("cause", "status"),
    [("sglang 0.5.23 has no --no-such-option-of-any-server", "ok"), ("a model is missing", "failure")],
)
def test_an_option_that_is_refused_before_the_start(cause: str, status: str, tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text(
        f"$ run --no-such-option-of-any-server\nmpillm: failed before anything was loaded\n  {cause}\n"
    )
    verdict, text = option_named(tmp_path)(2, log)
    assert verdict.value == status and cause in text
