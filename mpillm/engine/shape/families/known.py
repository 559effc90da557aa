"""The families of the torch core, by the names in `config.json`."""

from __future__ import annotations

from mpillm.engine.shape.families.deepseek_v3 import DEEPSEEK_V3
from mpillm.engine.shape.families.gemma3 import GEMMA3
from mpillm.engine.shape.families.gpt2 import GPT2
from mpillm.engine.shape.families.gpt_oss import GPT_OSS
from mpillm.engine.shape.families.llama import LLAMA
from mpillm.engine.shape.families.mistral import MISTRAL
from mpillm.engine.shape.families.mixtral import MIXTRAL
from mpillm.engine.shape.families.qwen2 import QWEN2
from mpillm.engine.shape.families.qwen3 import QWEN3
from mpillm.engine.shape.families.qwen3_moe import QWEN3_MOE

_ALL = (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GPT2, GPT_OSS, DEEPSEEK_V3, GEMMA3)
FAMILIES = {family.name: family for family in _ALL}
MODEL_TYPES = {family.model_type: family.name for family in _ALL}
