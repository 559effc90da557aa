"""The parameters of a `tensorrt_llm` model: each is read, refused or named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import mpillm
from disagg.errors import ConfigError
from mpillm.triton.parameters import _READ, unused_parameters
from mpillm.triton.repository import model_parameters

# As `generate-triton-config` takes them all, with values that ask for something.
FLAGS = {
    "cancellation_check_period_ms": 1,
    "cross_kv_cache_fraction": 0.5,
    "cuda_graph_cache_size": 6,
    "cuda_graph_mode": True,
    "eagle_choices": "{{0}}",
    "enable_chunked_context": True,
    "enable_context_fmha_fp32_acc": True,
    "enable_kv_cache_reuse": True,
    "enable_trt_overlap": True,
    "gpu_weights_percent": 0.5,
    "guided_decoding_backend": "xgrammar",
    "iter_stats_max_iterations": 3,
    "kv_cache_host_memory_bytes": 1,
    "kv_cache_onboard_blocks": True,
    "lookahead_ngram_size": 2,
    "lora_cache_host_memory_bytes": 5,
    "lora_prefetch_dir": "/lora",
    "max_beam_width": 2,
    "max_tokens_in_paged_kv_cache": 100,
    "multi_block_mode": False,
    "normalize_log_probs": False,
    "recv_poll_period_ms": 7,
    "speculative_decoding_fast_logits": True,
}


def test_parameters_without_effect_are_named() -> None:
    message = unused_parameters(model_parameters(FLAGS))
    named = set(re.findall(r"(\w+): ", message.partition(": ")[2]))
    assert named == set(FLAGS) - _READ
    assert "enable_trt_overlap: true" in message and "kv_cache_host_memory_bytes: 1" in message


def test_default_values_are_not_named() -> None:
    flags = {
        "sink_token_length": 0,
        "num_nodes": 1,
        "kv_cache_host_memory_bytes": 0,
        "gpu_weights_percent": 1,
    }
    assert unused_parameters(model_parameters({**flags, "decoding_mode": "top_k_top_p"})) == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"decoding_mode": "medusa"}, "decoding_mode: 'medusa': .* no such thing; it has top_k, top_p"),
        ({"max_attention_window_size": 4096}, "max_attention_window_size: '4096': .*; leave it out"),
        ({"sink_token_length": 4}, "sink_token_length: '4': .*; it has 0"),
        ({"encoder_engine_dir": "/encoder"}, "encoder_model_path: '/encoder'"),
        ({"num_nodes": 2}, "num_nodes: '2'"),
    ],
)
def test_parameters_that_would_change_answers_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        unused_parameters(model_parameters(flags))


def test_another_model_in_the_template_is_refused() -> None:
    core = '{"model_path": "/models/llama"}'
    assert unused_parameters({"core_config": core, "gpt_model_path": "/models/llama"}) == ""
    with pytest.raises(ConfigError, match="gpt_model_path: '/other': core_config names another model"):
        unused_parameters({"core_config": core, "gpt_model_path": "/other"})


def test_what_counts_as_read_is_read() -> None:
    """Each name is a text in the code of the models, or in that of the servers; one is Triton's own."""
    root = Path(mpillm.__file__).parents[1]
    files = (root / "mpillm/triton/models").glob("*.py")
    trees = [ast.walk(ast.parse(file.read_text(encoding="utf-8"))) for file in files]
    texts = {node.value for tree in trees for node in tree if isinstance(node, ast.Constant)}
    assert _READ - texts == {"FORCE_CPU_ONLY_INPUT_TENSORS", "gpu_device_ids"}
    assert '"gpu_device_ids"' in (root / "mpillm/triton/tritonserver.py").read_text(encoding="utf-8")
