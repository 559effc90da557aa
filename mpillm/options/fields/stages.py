"""The stages before a run, and the flags of the harness: checkpoint, engine, executor."""

from __future__ import annotations

from mpillm.core_names import EMBEDDED, RUNS_ENGINES, TRTLLM_DISAGG, TRTLLM_ENDPOINT
from mpillm.options.field import Effect, Options, Use, option
from mpillm.options.fields.effects import (
    BUILT,
    MODELS,
    OF_OWN_LOADS,
    OWN_LOADS,
    RUN,
    SERVE,
    STAGES,
    TOOLS,
    of_engines,
    used_by,
)
from mpillm.options.fields.general import workload_names
from mpillm.options.parsers import (
    batch_sizes,
    body_fields,
    boolean,
    flag_dict,
    headers,
    http_urls,
    model_names,
    session_header,
    url_path,
)
from mpillm.programs.load_clients.kinds import CONVERSATIONS

_OF_CONVERSATIONS = Effect(
    (
        Use((RUN,), (*TRTLLM_ENDPOINT, *TRTLLM_DISAGG), loads=(CONVERSATIONS,)),
        Use((SERVE,), (*TRTLLM_ENDPOINT, *TRTLLM_DISAGG)),
    )
)
# A load client sends its own requests to servers, unless these are disaggregated.
_OF_OWN_REQUESTS = Effect((*used_by(*TRTLLM_ENDPOINT, loads=OWN_LOADS).uses, *used_by(*TRTLLM_DISAGG).uses))


class CheckpointFields(Options, group="checkpoint"):
    """Stage 1: the checkpoint, quantized or as published."""

    llm_quantizer_outdir = option(
        "folder of the quantized checkpoint", effect=used_by(*MODELS, commands=STAGES, measured=False)
    )
    quantizer_lib_path_override = option(
        "the TensorRT-LLM source tree for quantization only [default: trtllm_lib_path]", effect=TOOLS
    )
    trtllm_lib_path = option("TensorRT-LLM's source tree, whose tools are run", effect=TOOLS)
    trtllm_checkpoint_flags = option(
        "flags of the quantization, key:value,key:value;"
        " the environment variable TRTLLM_CHECKPOINT_FLAGS overrides them",
        flag_dict,
        default={},
        effect=of_engines(*MODELS),
    )


class BuildFields(Options, group="build"):
    """Stage 2: the engine."""

    engine_dir = option(
        "folder of the engine; the ranks of mpillm's own engine map their weights from it",
        effect=of_engines(*EMBEDDED, *RUNS_ENGINES),
    )
    gpu_batch_size = option(
        "largest batch of an instance, requests: a number, or workload:number,workload:number",
        batch_sizes(workload_names),
    )
    trtllm_build_flags = option(
        "flags of the engine's build, key:value,key:value;"
        " the environment variable TRTLLM_BUILD_FLAGS overrides them",
        flag_dict,
        default={},
        effect=BUILT,
    )


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
        "HTTP servers that run already, host:port,host:port; behind TLS, or with a path: https://host/path;"
        " this also sets --core_type",
        http_urls,
        aliases=("url",),
        effect=used_by(*TRTLLM_ENDPOINT, *TRTLLM_DISAGG),
    )
    endpoint_type = option(
        "the requests of a test: completions; or messages, to which the server applies its chat template, in"
        " OpenAI's form for chats or for responses",
        choices=("completions", "chat", "responses"),
        default="completions",
        effect=used_by(*TRTLLM_ENDPOINT, *TRTLLM_DISAGG, commands=[RUN], loads=OWN_LOADS),
    )
    extra_body = option(
        'fields that are added to each request, as JSON: {"priority": 1}',
        body_fields,
        default={},
        effect=_OF_OWN_REQUESTS,
    )
    extra_headers = option(
        'headers that are added to each request, as JSON: {"X-Tenant": "a"}',
        headers,
        default={},
        effect=_OF_OWN_REQUESTS,
    )
    endpoint_path = option(
        "the path of requests after the URL's, in place of /v1/completions, /v1/chat/completions or"
        " /v1/responses",
        url_path,
        effect=_OF_OWN_REQUESTS,
    )
    insecure = option(
        "do not check the certificates of servers behind TLS",
        boolean,
        default=False,
        effect=used_by(*TRTLLM_ENDPOINT, *TRTLLM_DISAGG, measured=False),
    )
    session_header = option(
        "the header with a conversation's name, by which a router keeps the conversation at one server",
        session_header,
        default="X-Session-ID",
        effect=_OF_CONVERSATIONS,
    )
    lora_modules = option(
        "names of LoRA adapters, or of other models, at the server: requests, or conversations, take turns"
        " with them [default: one model, see --core_options model:NAME]",
        model_names,
        effect=used_by(*TRTLLM_ENDPOINT, *TRTLLM_DISAGG, commands=[RUN], loads=OWN_LOADS),
    )
    show_steady_state_progress = option(
        "also show the throughput of the last 30 seconds in the progress line",
        boolean,
        default=False,
        effect=OF_OWN_LOADS,
    )
