"""The stages from a model to an engine and its configurations (docs/howto/pipeline.md)."""

from mpillm.builder.trtllm import QuantizerConfig as QuantizerConfig
from mpillm.builder.trtllm import TRTLLMBuilderOp as TRTLLMBuilderOp
from mpillm.builder.trtllm import TRTLLMQuantizerOp as TRTLLMQuantizerOp
