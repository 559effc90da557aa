"""Stage 3: what holds for a harness of any core."""

from __future__ import annotations

from mpillm.configurator import Field
from mpillm.fields.parsers import boolean, flag_dict, urls

llm_gen_config_path = Field("llm_gen_config_path", "the model's generation_config.json", group="harness")
trtllm_runtime_flags = Field(
    "trtllm_runtime_flags",
    "flags of the executor, key:value,key:value; TRTLLM_RUNTIME_FLAGS is laid over them",
    flag_dict,
    default={},
    group="harness",
    overlay_environ="TRTLLM_RUNTIME_FLAGS",
)
trtllm_server_urls = Field("trtllm_server_urls", "TensorRT-LLM's HTTP servers, host:port,host:port", urls, group="harness")
show_steady_state_progress = Field(
    "show_steady_state_progress",
    "the progress line also shows the throughput of the last 30 seconds",
    boolean,
    default=False,
    group="harness",
)
