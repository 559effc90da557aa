"""The model, and how its engine runs."""

from __future__ import annotations

from mpillm.core_names import DEFAULT, DUMMY, EMBEDDED, TRTLLM_DISAGG, TRTLLM_ENDPOINT, TRTLLM_EXECUTOR
from mpillm.options.field import Effect, Options, Use, option
from mpillm.options.fields.effects import (
    BOTH,
    COMPUTING,
    LIBRARY,
    MODELS,
    RUN,
    SERVE,
    of_engines,
    used_by,
)
from mpillm.options.parsers import boolean, flag_dict, fraction, gigabytes, one_of, one_or_more, positive

# Policies by the names in NVIDIA's harness, with the names in TensorRT-LLM.
SCHEDULER_POLICIES = {
    "max_util": "MAX_UTILIZATION",
    "no_evict": "GUARANTEED_NO_EVICT",
    "static": "STATIC_BATCH",
}
CHUNKING_POLICIES = {name: name.upper() for name in ("first_come_first_served", "equal_progress")}


class ModelFields(Options, group="model"):
    """The model, and how its engine runs."""

    model_path = option(
        "a Hugging Face folder, or a preset with random weights: llama2-7b, llama2-13b, llama2-70b,"
        " llama3.1-8b, llama3.1-70b, llama3.1-405b, llama3.2-1b, mixtral-8x7b, gpt-oss-20b, gpt-oss-120b,"
        " qwen3-0.6b, qwen3-30b-a3b, tiny-llama, tiny-mixtral"
    )
    load_format = option(
        "read the weights, or make random ones from config.json",
        default="auto",
        choices=("auto", "dummy"),
        effect=of_engines(*EMBEDDED, "trtllm_hlapi", *TRTLLM_DISAGG),
    )
    dtype = option(
        "type of the weights, and of the KV cache unless kv_cache_dtype sets it; auto: the checkpoint's",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        effect=of_engines(*EMBEDDED, *TRTLLM_DISAGG),
    )
    quantization = option(
        "type of the layers' weights. auto: the checkpoint's."
        " int8 (only on CPUs), fp8, mxfp4 (only experts) and int4 quantize an unquantized checkpoint while"
        " loading. none widens a checkpoint's MXFP4",
        default="auto",
        choices=("auto", "none", "int8", "fp8", "mxfp4", "int4"),
        effect=of_engines(*EMBEDDED),
    )
    kv_cache_dtype = option(
        "type of the KV cache. auto: fp8 if the checkpoint has scales for it, otherwise dtype;"
        " fp8 without scales has scale 1",
        default="auto",
        choices=("auto", "bfloat16", "fp8"),
        effect=of_engines(*EMBEDDED, *TRTLLM_DISAGG),
    )
    precision = option(
        "type of the layers' weights, in the words of NVIDIA's configurations: sets qformat among"
        " trtllm_checkpoint_flags and, for mpillm's own engine, quantization",
        choices=("fp4", "nvfp4", "fp8", "fp16", "bf16", "fp32"),
        effect=of_engines(*MODELS),
    )
    device = option(
        "what the engine runs on; auto: GPUs, one per worker rank, where there are any",
        default="auto",
        choices=("auto", "cuda", "cpu"),
        effect=used_by(DEFAULT, *LIBRARY),
    )
    max_batch_size = option("maximum simultaneous requests of an instance [default: the core's]", positive)
    max_num_tokens = option(
        "maximum tokens of one engine step [default: the core's]", positive, effect=of_engines(*MODELS)
    )
    max_seq_len = option("maximum tokens of prompt and answer together [default: the model's]", positive)
    kv_cache_tokens = option(
        "size of a rank's KV cache, tokens [default: the core's]",
        positive,
        effect=of_engines(*COMPUTING, *DUMMY),
    )
    kv_cache_free_gpu_mem_fraction = option(
        "without kv_cache_tokens: the KV cache's share of the GPU memory that the model leaves free",
        fraction,
        default=0.80,
        effect=of_engines(*MODELS),
    )
    kv_host_cache_gb = option(
        "GB of host memory of each rank that keep the blocks for which its KV cache has no room."
        " Generation instances have none",
        gigabytes,
        effect=of_engines(*EMBEDDED, needs=("enable_kv_cache_reuse", True)),
    )
    tokens_per_block = option(
        "tokens of one KV cache block",
        positive,
        default=32,
        effect=Effect(
            (
                *of_engines(*EMBEDDED, *TRTLLM_DISAGG).uses,
                Use(BOTH, needs=("traffic_distribution_policy", "kv_cache_aware")),
            )
        ),
    )
    enable_chunked_context = option(
        "allow a prompt to be computed in several steps", boolean, default=False, effect=of_engines(*MODELS)
    )
    context_chunking_policy = option(
        "which prompts a step computes: the oldest first, or equal parts of all",
        default="first_come_first_served",
        choices=tuple(CHUNKING_POLICIES),
        effect=of_engines(*COMPUTING, *TRTLLM_ENDPOINT, needs=("enable_chunked_context", True)),
    )
    enable_max_num_tokens_tuning = option(
        "with enable_chunked_context: choose how many prompt tokens a step takes, at most max_num_tokens: the"
        " fewest that are computed at nearly the best rate, as measured before the phase ready (TensorRT-LLM"
        " tunes while it runs)",
        boolean,
        default=False,
        effect=of_engines(*EMBEDDED, *TRTLLM_EXECUTOR, *TRTLLM_DISAGG),
    )
    batch_scheduler_policy = option(
        "when a request starts. max_util: once its prompt fits the KV cache. If the cache fills up later,"
        " a request is evicted and computed again. no_evict: once its longest answer also fits."
        " static: in batches that run to their end",
        one_of(*SCHEDULER_POLICIES, **{policy.lower(): name for name, policy in SCHEDULER_POLICIES.items()}),
        default="max_util",
        effect=of_engines(*MODELS),
    )
    enable_kv_cache_reuse = option(
        "compute a prefix that several prompts share only once; MLPerf forbids it."
        " Generation instances do not look up the prompts of handoffs",
        boolean,
        default=False,
        effect=of_engines(*MODELS),
    )
    reset_prefix_cache = option(
        "run: empty the prefix caches of all instances or servers after the warm-up, before the test."
        " serve: answer POST /reset_prefix_cache, which does so",
        boolean,
        default=False,
        effect=Effect((Use((RUN,), (DEFAULT, *TRTLLM_ENDPOINT)), Use((SERVE,), (DEFAULT,)))),
        group="topology",  # a server gets a request, not an option
    )
    profile = option(
        "profile the servers in the test, by POST /start_profile and /stop_profile (vLLM, SGLang). The traces"
        " of servers that the run starts are in its run directory. The figures are slower than without it",
        boolean,
        default=False,
        effect=used_by(*TRTLLM_ENDPOINT, commands=[RUN]),
        group="topology",
    )
    speculative_config = option(
        "speculative decoding, with the same answers: key:value,key:value (docs/explain/speculation.md):"
        " decoding_type (NGram, Draft_Target, Eagle, MTP), max_draft_len, max_matching_ngram_size,"
        " speculative_model, num_nextn_predict_layers, max_concurrency; MLPerf forbids it for all workloads"
        " that this engine runs",
        flag_dict,
        effect=of_engines(*EMBEDDED, *TRTLLM_DISAGG),
    )
    acceptance_length = option(
        "accept draft tokens as if the mean number of tokens per verification step were this, the model's own"
        " token included, whatever the draft tokens are; for --speculative_config, and for vllm, sglang,"
        " trtllm-serve and mpillm as --server. The result is not an MLPerf result",
        one_or_more,
        effect=used_by(DEFAULT),
    )
    num_threads = option(
        "CPU threads of each instance rank [default: the node's cores, shared evenly]",
        positive,
        effect=of_engines(*EMBEDDED),
    )
