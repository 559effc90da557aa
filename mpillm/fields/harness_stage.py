"""Stage 3: the harness, with any core."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.parsers import boolean, flag_dict, http_urls
from mpillm.core_names import TRTLLM_DISAGG, TRTLLM_ENDPOINT
from mpillm.fields.effects import REPORTED, used_by


class HarnessFields(Options):
    """Stage 3: the harness, with any core."""

    llm_gen_config_path = Field("llm_gen_config_path", "the model's generation_config.json", group="harness")
    trtllm_runtime_flags = Field(
        "trtllm_runtime_flags",
        "flags of the executor, key:value,key:value;"
        " the environment variable TRTLLM_RUNTIME_FLAGS overrides them",
        flag_dict,
        default={},
        group="harness",
    )
    trtllm_server_urls = Field(
        "trtllm_server_urls",
        "HTTP servers, host:port,host:port; a host behind TLS: https://host:port",
        http_urls,
        effect=used_by(*TRTLLM_ENDPOINT, *TRTLLM_DISAGG),
        group="harness",
    )
    show_steady_state_progress = Field(
        "show_steady_state_progress",
        "show the throughput of the last 30 seconds in the progress line, too",
        boolean,
        default=False,
        effect=REPORTED,
        group="harness",
    )
