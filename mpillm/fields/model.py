"""The model, and how its engine runs."""

from __future__ import annotations

from mpillm.configurator import Field
from mpillm.fields.parsers import boolean, fraction, positive

model_path = Field(
    "model_path",
    "a Hugging Face folder, or a preset with random weights: llama2-7b, llama2-13b, llama2-70b, llama3.1-8b, llama3.1-405b,"
    " llama3.2-1b, mixtral-8x7b, tiny-llama, tiny-mixtral",
    group="model",
)
load_format = Field(
    "load_format", "read the weights, or make random ones from config.json", default="auto", choices=("auto", "dummy"), group="model"
)
dtype = Field(
    "dtype", "of weights and KV cache; auto is the checkpoint's", default="auto", choices=("auto", "float32", "bfloat16"), group="model"
)
quantization = Field(
    "quantization",
    "of the layers' weights; auto is the checkpoint's; int8 (CPUs alone) and fp8 quantise a checkpoint of floats as it is loaded",
    default="auto",
    choices=("auto", "none", "int8", "fp8"),
    group="model",
)
device = Field(
    "device",
    "what the engine runs on; auto: GPUs, one for each worker rank, where there are any",
    default="auto",
    choices=("auto", "cuda", "cpu"),
    group="model",
)
max_batch_size = Field("max_batch_size", "requests that an instance runs at once [default: the core's]", positive, group="model")
max_num_tokens = Field("max_num_tokens", "tokens of one engine step [default: the core's]", positive, group="model")
max_seq_len = Field("max_seq_len", "prompt and answer together [default: the model's]", positive, group="model")
kv_cache_tokens = Field("kv_cache_tokens", "size of a rank's KV cache [default: the core's]", positive, group="model")
kv_cache_free_gpu_mem_fraction = Field(
    "kv_cache_free_gpu_mem_fraction",
    "without kv_cache_tokens: the part of a GPU's memory, of what the model leaves, that the KV cache takes",
    fraction,
    default=0.80,
    group="model",
)
tokens_per_block = Field("tokens_per_block", "tokens of one KV cache block", positive, default=32, group="model")
enable_chunked_context = Field("enable_chunked_context", "let a prompt be computed in several steps", boolean, default=False, group="model")
context_chunking_policy = Field(
    "context_chunking_policy",
    "whose prompt is computed in a step: the oldest's as far as it goes, or a like piece of each",
    default="first_come_first_served",
    choices=("first_come_first_served", "equal_progress"),
    group="model",
)
batch_scheduler_policy = Field(
    "batch_scheduler_policy",
    "when a request starts: as soon as its prompt fits the KV cache (one that finds it full later is evicted and computed again), when "
    "its longest answer fits, or in batches that run to their end",
    default="max_util",
    choices=("max_util", "no_evict", "static"),
    group="model",
)
enable_kv_cache_reuse = Field(
    "enable_kv_cache_reuse",
    "compute a beginning that prompts have in common once; MLPerf forbids it; generation instances do not look handed-over prompts up",
    boolean,
    default=False,
    group="model",
)
num_threads = Field("num_threads", "CPU threads of each instance rank [default: the node's cores, shared evenly]", positive, group="model")
