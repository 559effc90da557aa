"""Stand-ins for TensorRT-LLM's tools, which cannot be installed here: same options refused, same files
written.

They show that our command lines are right and that failures of the tools are handled, not that an engine
works.
"""

from __future__ import annotations

import json
from pathlib import Path

_HEAD = """
import argparse, json, os, pathlib, sys, time
parser = argparse.ArgumentParser(allow_abbrev=False)
def add(*names, **options):
    for name in names:
        parser.add_argument("--" + name, **options)
def end(files, config):
    folder = pathlib.Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("STAND_IN") == "fails":
        (folder / files[0]).write_bytes(b"half")
        sys.exit("CUDA out of memory")
    if os.environ.get("STAND_IN") == "hangs":
        (folder / files[0]).write_bytes(b"half")
        time.sleep(600)
    for name in files[:-1] if os.environ.get("STAND_IN") == "forgets" else files:
        (folder / name).write_bytes(b"weights")
    (folder / "config.json").write_text(json.dumps(config))
    print("wrote", folder)
"""

# As in examples/quantization/quantize.py.
_QUANTIZE = (
    _HEAD
    + """
add("model_dir", "output_dir", required=True)
add("calib_dataset")
add("tp_size", "pp_size", "cp_size", "calib_size", "batch_size", "calib_max_seq_length", type=int, default=1)
add("dtype", choices=["auto", "float16", "bfloat16", "float32"], default="auto")
formats = ["nvfp4", "fp8", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo", "full_prec"]
add("qformat", choices=formats, default="full_prec")
add("kv_cache_dtype", choices=["int8", "fp8"])
add("export_format", choices=["tensorrt_llm", "hf"], default="tensorrt_llm")
add("quantize_lm_head", action="store_true")
arguments = parser.parse_args()
assert (pathlib.Path(arguments.model_dir) / "config.json").exists()
mapping = {"tp_size": arguments.tp_size, "pp_size": arguments.pp_size}
ranks = range(arguments.tp_size * arguments.pp_size)
names = ["model.safetensors"] if arguments.export_format == "hf" else [f"rank{r}.safetensors" for r in ranks]
end(names, {"mapping": mapping, "quantization": {"quant_algo": arguments.qformat}})
"""
)

# As in examples/models/core/llama/convert_checkpoint.py.
_CONVERT = (
    _HEAD
    + """
add("model_dir", "output_dir", required=True)
add("tp_size", "pp_size", "moe_tp_size", "moe_ep_size", "workers", type=int, default=1)
add("dtype", choices=["auto", "float16", "bfloat16", "float32"], default="auto")
add("use_weight_only", "use_fp8_rowwise", action="store_true")
add("weight_only_precision", choices=["int8", "int4", "int8_gptq", "int4_gptq", "int4_awq"])
arguments = parser.parse_args()
mapping = {"tp_size": arguments.tp_size, "pp_size": arguments.pp_size, "moe_ep_size": arguments.moe_ep_size}
end([f"rank{r}.safetensors" for r in range(arguments.tp_size * arguments.pp_size)], {"mapping": mapping})
"""
)

# As in tensorrt_llm/commands/build.py.
_BUILD = (
    _HEAD
    + """
add("checkpoint_dir", "output_dir", required=True)
limits = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width")
add(*limits, "workers", type=int, default=1)
add("opt_num_tokens", "max_lora_rank", type=int)
switches = ("remove_input_padding", "use_paged_context_fmha", "context_fmha", "multiple_profiles")
add(*switches, "paged_kv_cache", choices=["enable", "disable"])
add("gather_context_logits", "gather_generation_logits", "gather_all_token_logits", action="store_true")
add("lora_plugin", choices=["auto", "float16", "float32", "bfloat16", "int32", "disable"])
modules = ["attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_gate"]
add("lora_target_modules", nargs="+", choices=modules)
add("gemm_plugin", choices=["auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable"])
add("gpt_attention_plugin", choices=["auto", "float16", "float32", "bfloat16", "int32", "disable"])
add("kv_cache_type", choices=["continuous", "paged", "disabled"])
arguments = parser.parse_args()
mapping = json.loads((pathlib.Path(arguments.checkpoint_dir) / "config.json").read_text())["mapping"]
build = {name: getattr(arguments, name) for name in limits}
ranks = mapping["tp_size"] * mapping["pp_size"]
config = {"pretrained_config": {"mapping": mapping}, "build_config": build}
end([f"rank{r}.engine" for r in range(ranks)], config)
"""
)


def make_library(folder: Path) -> Path:
    """Make TensorRT-LLM's repository, as far as our commands look into it."""
    for name, text in (
        ("examples/quantization/quantize.py", _QUANTIZE),
        ("examples/models/core/llama/convert_checkpoint.py", _CONVERT),
        ("examples/models/core/qwen/convert_checkpoint.py", _CONVERT),
        ("tensorrt_llm/commands/build.py", _BUILD),
    ):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    return folder


def make_model(folder: Path, architecture: str = "LlamaForCausalLM", **config: int) -> Path:
    """Return a Hugging Face folder, as far as anybody looks into it before weights are read."""
    folder.mkdir(parents=True)
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, **config}
    (folder / "config.json").write_text(json.dumps(shape | {"architectures": [architecture]}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder
