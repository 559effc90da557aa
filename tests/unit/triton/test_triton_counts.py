"""What a tritonserver says of itself, as TensorRT-LLM's backend and as a server without it write it."""

from __future__ import annotations

import pytest

from mpillm.cores.openai_client.server_counts import ServerCounts
from mpillm.triton.core.triton_counts import metrics_url, reading_of

TRTLLM = """# HELP nv_trt_llm_request_metrics TRT LLM request metrics
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 4
nv_trt_llm_request_metrics{model="other",request_type="active",version="1"} 1
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 30
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 120
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="reused",model="tensorrt_llm",version="1"} 5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="other",version="1"} 9
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="other",version="1"} 10
nv_llm_output_token_len_sum{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 77
nv_llm_output_token_len_count{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 7
nv_llm_input_token_len_sum{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1"} 1e3
nv_inference_pending_request_count{model="ensemble",version="1"} 40
"""


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (TRTLLM, ServerCounts(5, 2, 0.9, prompt_tokens=1000, generated_tokens=77, cached_tokens=320)),
        ('nv_inference_pending_request_count{model="a"} 3\n', ServerCounts(waiting=3)),
        ("nv_trt_llm_request_metrics nonsense\nnv_trt_llm_kv_cache_block_metrics{} 1\n", ServerCounts()),
        ("", ServerCounts()),
    ],
)
def test_a_page(page: str, expected: ServerCounts) -> None:
    assert reading_of(page) == expected


def test_where_metrics_are() -> None:
    assert metrics_url("h:8001") == "http://h:8002" and metrics_url("h:1", "9") == "http://h:9"
