"""TensorRT-LLM's `convert_checkpoint.py` scripts by model family; each has its own options."""

from __future__ import annotations

from typing import Any, NamedTuple

from disagg.errors import ConfigError, about
from mpillm.engine.shape.read_config import architecture_of
from mpillm.stages.preconditions import EngineParallelism
from mpillm.trtllm.tool_options import CONVERT, GEMMA_CONVERT, GPT_CONVERT, QWEN_CONVERT, Tool


class Converter(NamedTuple):
    """The script in a folder of TensorRT-LLM's examples."""

    folder: str
    tool: Tool
    architectures: tuple[str, ...]
    has_stages: bool = True
    has_experts: bool = False

    @property
    def scripts(self) -> tuple[str, str]:
        """Paths of the script in 1.x and in older releases."""
        script = f"{self.folder}/convert_checkpoint.py"
        return f"examples/models/core/{script}", f"examples/{script}"

    @about("pipeline_parallelism", "moe_expert_parallelism")
    def sizes(self, layout: EngineParallelism) -> list[str]:
        """Return the options for a layout. Raises ConfigError if the script does not support it."""
        for size, option, has_option in (
            (layout.pp_size, "pipeline_parallelism", self.has_stages),
            (layout.ep_size, "moe_expert_parallelism", self.has_experts),
        ):
            if size > 1 and not has_option:
                raise ConfigError(
                    f"--{option} {size}: {self.folder}'s convert_checkpoint.py has no option for it"
                )
        if not self.has_stages:
            return ["--ckpt-type=hf", f"--world-size={layout.tp_size}"]
        options = [f"--tp_size={layout.tp_size}", f"--pp_size={layout.pp_size}"]
        if layout.ep_size > 1:
            options += [
                f"--moe_tp_size={layout.tp_size // layout.ep_size}",
                f"--moe_ep_size={layout.ep_size}",
            ]
        return options


LLAMA = Converter(
    "llama", CONVERT, ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), has_experts=True
)
CONVERTERS = (
    LLAMA,
    Converter(
        "qwen",
        QWEN_CONVERT,
        ("QWenLMHeadModel", *(f"Qwen{n}{moe}ForCausalLM" for n in (2, 3) for moe in ("", "Moe"))),
        has_experts=True,
    ),
    Converter(
        "gemma", GEMMA_CONVERT, tuple(f"Gemma{n}ForCausalLM" for n in ("", "2", "3")), has_stages=False
    ),
    Converter("gpt", GPT_CONVERT, ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "Starcoder2ForCausalLM")),
)


@about("model_path")
def converter_for(config: dict[str, Any], model: str) -> Converter:
    """Return the converter for a model's `config.json`. Raises ConfigError if there is none."""
    name = architecture_of(config)
    for converter in CONVERTERS:
        if name in converter.architectures:
            return converter
    known = ", ".join(name for converter in CONVERTERS for name in converter.architectures)
    raise ConfigError(
        f"--model_path {model}: TensorRT-LLM has no convert_checkpoint.py for {name}; it has one for {known};"
        " its PyTorch backend (--core_type trtllm_hlapi) reads the folder as it is"
    )
