"""Options of TensorRT-LLM's tools, to find a misspelled flag before a calibration that takes an hour.

Source of names and values: TensorRT-LLM 1.x, `examples/quantization/quantize.py`,
`examples/models/core/*/convert_checkpoint.py`, and `trtllm-build` (`tensorrt_llm/commands/build.py` with the
plug-ins of `tensorrt_llm/plugin/plugin.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disagg.errors import ConfigError, nearest
from mpillm.stages.checkpoint import PARALLELISM

_Kind = str | tuple[str, ...]
_INT: _Kind = "a whole number"
_FLOAT: _Kind = "a number"
_TEXT: _Kind = "text"
_FLAG: _Kind = "true or false"  # a switch without a value
_LIST: _Kind = "words with spaces between them"
_SWITCH: _Kind = ("enable", "disable")
_DTYPES = ("auto", "float16", "bfloat16", "float32")
_PLUGIN = ("auto", "float16", "float32", "bfloat16", "int32", "disable")
_FP8_PLUGIN = ("fp8", "disable")


@dataclass(frozen=True)
class Tool:
    """One of TensorRT-LLM's programs. `fields`: options that mpillm sets, with mpillm's field."""

    name: str
    options: Mapping[str, _Kind]
    fields: Mapping[str, str]

    def arguments(self, flags: Mapping[str, Any], source: str) -> list[str]:
        """Return ``--name=value`` for each flag with a value.

        Raises ConfigError, beginning with `source`, for a flag that the tool does not accept.
        """
        return [
            argument
            for name, value in flags.items()
            if value is not None
            for argument in self._argument(name, value, source)
        ]

    def _argument(self, name: str, value: Any, source: str) -> list[str]:
        if name in self.fields:
            raise ConfigError(f"{source}: {name} is set by --{self.fields[name]}")
        if name not in self.options:
            hint = f"; {_REMOVED[name]}" if name in _REMOVED else nearest(name, self.options)
            raise ConfigError(f"{source}: {self.name} has no option '{name}'{hint}")
        kind = self.options[name]
        if kind is _FLAG:
            if type(value) is not bool:
                raise ConfigError(f"{source}: {name} {value}: expected true or false")
            return [f"--{name}"] if value else []
        text = str(value)
        if kind is _LIST:
            return [f"--{name}", *text.split()]
        if kind is _SWITCH and type(value) is bool:
            text = "enable" if value else "disable"
        if text == "fp4" and "nvfp4" in kind:  # NVIDIA's configurations mean nvfp4
            text = "nvfp4"
        if isinstance(kind, tuple) and text not in kind:
            raise ConfigError(f"{source}: {name} {text}: not one of {', '.join(kind)}{nearest(text, kind)}")
        if (kind is _INT and type(value) is not int) or (kind is _FLOAT and type(value) not in (int, float)):
            raise ConfigError(f"{source}: {name} {text}: expected {kind}")
        return [f"--{name}={text}"]


def _options(kinds: Mapping[_Kind, str], **others: _Kind) -> dict[str, _Kind]:
    return {name: kind for kind, names in kinds.items() for name in names.split()} | others


_FIELDS = {"model_dir": "model_path", "output_dir": "llm_quantizer_outdir", **PARALLELISM}

QUANTIZE = Tool(
    "quantize.py",
    _options(
        {
            _INT: "seed tokenizer_max_seq_length batch_size calib_size calib_max_seq_length calib_tp_size"
            " calib_pp_size cp_size awq_block_size num_medusa_heads num_medusa_layers max_draft_len",
            _FLOAT: "auto_quantize_bits",
            _TEXT: "calib_dataset nemo_ckpt_path medusa_hidden_act medusa_model_dir autoq_format",
            _FLAG: "quantize_lm_head quant_medusa_head",
        },
        decoder_type=("gptnext", "llama"),
        device=("cuda", "cpu"),
        device_map=("auto", "sequential", "cpu", "gpu"),
        dtype=_DTYPES,
        qformat=("nvfp4", "fp8", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo", "full_prec"),
        kv_cache_dtype=("int8", "fp8"),
        export_format=("tensorrt_llm", "hf"),
    ),
    _FIELDS,
)

CONVERT = Tool(
    "convert_checkpoint.py",
    _options(
        {
            _INT: "cp_size moe_tp_size vocab_size n_positions n_layer n_head n_kv_head n_embd inter_size"
            " multiple_of calib_size calib_max_seq_length group_size workers moe_num_experts moe_top_k"
            " moe_renorm_mode embedding_sharding_dim",
            _FLOAT: "ffn_dim_multiplier rms_norm_eps smoothquant rotary_base",
            _TEXT: "meta_ckpt_dir calib_dataset quant_ckpt_path hidden_act log_level",
            _FLAG: "use_weight_only disable_weight_only_quant_plugin use_qserve per_channel per_token"
            " int8_kv_cache fp8_kv_cache use_fp8 use_nvfp4 use_fp8_rowwise use_meta_fp8_rowwise_recipe"
            " per_group load_by_shard load_model_on_cpu use_parallel_embedding save_config_only"
            " remove_duplicated_kv_heads",
        },
        dtype=_DTYPES,
        weight_only_precision=("int8", "int4", "int8_gptq", "int4_gptq", "int4_awq"),
    ),
    _FIELDS,
)

_CALIBRATED = "int8_kv_cache per_channel per_token use_weight_only load_model_on_cpu"

QWEN_CONVERT = Tool(
    "qwen's convert_checkpoint.py",
    _options(
        {
            _INT: "cp_size moe_tp_size group_size workers embedding_sharding_dim",
            _FLOAT: "smoothquant",
            _TEXT: "calib_dataset",
            _FLAG: f"{_CALIBRATED} disable_weight_only_quant_plugin per_group use_parallel_embedding",
        },
        dtype=_DTYPES,
        weight_only_precision=("int8", "int4", "int4_gptq", "int8_gptq"),
    ),
    _FIELDS,
)

GPT_CONVERT = Tool(
    "gpt's convert_checkpoint.py",
    _options(
        {
            _INT: "embedding_sharding_dim workers",
            _FLOAT: "smoothquant",
            _TEXT: "calib_dataset dataset_cache_dir log_level",
            _FLAG: f"{_CALIBRATED} use_parallel_embedding",
        },
        gpt_variant=("gpt2", "santacoder", "starcoder", "starcoder2", "persimmon", "kosmos-2", "nemotron"),
        dtype=_DTYPES,
        weight_only_precision=("int8", "int4"),
    ),
    _FIELDS,
)

GEMMA_CONVERT = Tool(
    "gemma's convert_checkpoint.py",
    _options(
        {
            _FLOAT: "smoothquant",
            _TEXT: "quant_ckpt_path calib_dataset tokenizer_dir",
            _FLAG: f"{_CALIBRATED} use-int8-weight-only-embedding enable_fp8 fp8_kv_cache use_smooth_quant",
        },
        dtype=_DTYPES,
        weight_only_precision=("int8", "int4", "w4a8_awq", "w4a16_awq"),
    ),
    _FIELDS | {"ckpt-type": "model_path", "world-size": PARALLELISM["tp_size"]},
)

BUILD = Tool(
    "trtllm-build",
    _options(
        {
            _INT: "max_batch_size max_input_len max_seq_len max_beam_width max_num_tokens opt_num_tokens"
            " max_encoder_input_len max_prompt_embedding_table_size workers max_lora_rank max_draft_len"
            " tokens_per_block",
            _TEXT: "model_config build_config model_cls_file model_cls_name input_timing_cache"
            " output_timing_cache visualize_network log_level",
            _LIST: "lora_dir lora_target_modules",
            _FLAG: "strip_plan weight_sparsity weight_streaming fast_build enable_debug_output"
            " monitor_memory gather_context_logits gather_generation_logits gather_all_token_logits",
            _SWITCH: "paged_kv_cache dora_plugin context_fmha bert_context_fmha_fp32_acc"
            " remove_input_padding use_paged_context_fmha use_fp8_context_fmha fuse_fp4_quant"
            " multiple_profiles paged_state streamingllm norm_quant_fusion reduce_fusion user_buffer"
            " use_fused_mlp pp_reduce_scatter",
            _PLUGIN: "bert_attention_plugin gpt_attention_plugin fp8_rowwise_gemm_plugin lora_plugin"
            " moe_plugin mamba_conv1d_plugin nccl_plugin",
            _FP8_PLUGIN: "gemm_swiglu_plugin low_latency_gemm_plugin low_latency_gemm_swiglu_plugin",
        },
        kv_cache_type=("continuous", "paged", "disabled"),
        profiling_verbosity=("layer_names_only", "detailed", "none"),
        logits_dtype=("float16", "float32"),
        lora_ckpt_source=("hf", "nemo"),
        speculative_decoding_mode=(
            "draft_tokens_external",
            "lookahead_decoding",
            "medusa",
            "explicit_draft_tokens",
            "eagle",
        ),
        gemm_plugin=(*_PLUGIN[:-1], "fp8", "nvfp4", "disable"),
        gemm_allreduce_plugin=("float16", "bfloat16", "disable"),
    ),
    {
        "checkpoint_dir": "llm_quantizer_outdir",
        "output_dir": "engine_dir",
        **PARALLELISM,
        "dry_run": "dry_run",
    },
)

# Options of older releases, for example in tutorials for TensorRT-LLM 0.9, and of the older scripts build.py.
_REMOVED = {
    "max_output_len": "use max_seq_len: the prompt's and the answer's tokens together",
    "context_fmha_fp32_acc": "it is a runtime option now:"
    " --trtllm_runtime_flags=enable_context_fmha_fp32_acc:true",
    "multi_block_mode": "it is a runtime option now: --trtllm_runtime_flags=multi_block_mode:true",
    "use_inflight_batching": "it is a runtime option now: --trtllm_runtime_flags=use_inflight_batching:true",
    "auto_parallel": "it follows from --tensor_parallelism and --pipeline_parallelism",
    "gpus_per_node": "it was for auto_parallel, which is gone",
    "cluster_key": "it was for auto_parallel, which is gone",
    "use_custom_all_reduce": "the all-reduce is chosen when the engine runs",
    "enable_xqa": "it is always on",
    "enable_context_fmha": "use context_fmha",
    "use_gpt_attention_plugin": "use gpt_attention_plugin",
    "use_gemm_plugin": "use gemm_plugin",
    "use_lora_plugin": "use lora_plugin",
    "use_layernorm_plugin": "TensorRT-LLM has no such plugin any more",
    "dtype": "the checkpoint has it: --trtllm_checkpoint_flags=dtype:…",
    "hidden_act": "the checkpoint has it, from the model's config.json",
    "world_size": "it follows from --tensor_parallelism and --pipeline_parallelism",
    "model_dir": "name the model with --model_path",
}
