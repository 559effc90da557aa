"""Operations that write checkpoints and engines with TensorRT-LLM's tools."""

from typing import Any

from mpillm.stages.checkpoint import QuantizerConfig as QuantizerConfig
from mpillm.trtllm.engines import TRTLLMBuilderOp as TRTLLMBuilderOp
from mpillm.trtllm.engines import TRTLLMLibraryLoader as TRTLLMLibraryLoader
from mpillm.trtllm.engines import TRTLLMQuantizerOp as TRTLLMQuantizerOp


class HFQuantizerOp(TRTLLMQuantizerOp):
    """Quantizes a Hugging Face folder for the PyTorch backend."""

    def __init__(self, config: QuantizerConfig | None = None, **more: Any) -> None:
        super().__init__(config, **{**more, "export_hf": True})
