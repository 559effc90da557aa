"""Stage 3: the harness, with any core."""

from __future__ import annotations

from mpillm.configurator import Options, option
from mpillm.configurator.parsers import boolean, flag_dict, http_urls
from mpillm.core_names import TRTLLM_DISAGG, TRTLLM_ENDPOINT
from mpillm.fields.effects import REPORTED, used_by


class HarnessFields(Options, group="harness"):
    """Stage 3: the harness, with any core."""

    llm_gen_config_path = option("the model's generation_config.json")
    trtllm_runtime_flags = option(
        "flags of the executor, key:value,key:value;"
        " the environment variable TRTLLM_RUNTIME_FLAGS overrides them",
        flag_dict,
        default={},
    )
    trtllm_server_urls = option(
        "HTTP servers, host:port,host:port; a host behind TLS: https://host:port",
        http_urls,
        effect=used_by(*TRTLLM_ENDPOINT, *TRTLLM_DISAGG),
    )
    show_steady_state_progress = option(
        "show the throughput of the last 30 seconds in the progress line, too",
        boolean,
        default=False,
        effect=REPORTED,
    )
