"""GPT-2's checkpoints: their names, q, k and v in one matrix, and matrices as [in, out]."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpillm.engine.dtypes import STORED
from mpillm.engine.model.tensor_shapes import tensor_shapes
from mpillm.engine.parallel.layout import ALL
from mpillm.engine.weights.entries import Entry

if TYPE_CHECKING:
    from torch import Tensor

    from mpillm.engine.model.model_config import ModelConfig

_WHOLE = {
    "model.embed_tokens": "wte",
    "model.embed_positions": "wpe",
    "model.norm": "ln_f",
    "lm_head": "lm_head",
}
_OF_LAYER = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.c_fc": "mlp.c_fc",
    "mlp.c_proj": "mlp.c_proj",
}
_LAYER = re.compile(r"model[.]layers[.](\d+)[.](.+)")
_IN_QKV = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2}


class Gpt2Names:
    """Implements `checkpoint_forms.Form`. GPT2LMHeadModel puts `transformer.` before all names."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    def holds(self, name: str) -> bool:
        """Return whether a parameter is stored in this form: all are."""
        return True

    def entries(self) -> dict[str, Entry]:
        made: dict[str, Entry] = {}
        for name, shape in tensor_shapes(self._model).items():
            stored, place = _place(name)
            n_out = shape[0] if place is None else 3 * shape[0]
            turned = (*shape[1:], n_out) if _is_turned(name) else (n_out, *shape[1:])
            made[stored] = Entry(STORED[self._model.dtype], turned)
        return made

    def get(
        self, name: str, rows: slice, columns: slice, read: Callable[[str, slice, slice], Tensor]
    ) -> Tensor:
        stored, place = _place(name)
        if place is not None:
            n = self._model.hidden_size
            start, stop, _ = rows.indices(n)
            rows = slice(place * n + start, place * n + stop)
        if _is_turned(name):
            return read(stored, columns, rows).t().contiguous()
        return read(stored, rows, columns if name.endswith(".weight") else ALL)


def _place(name: str) -> tuple[str, int | None]:
    """Return a parameter's name there, and which third of the tensor it is, if it is one."""
    module, _, kind = name.rpartition(".")
    if (found := _LAYER.fullmatch(module)) is None:
        return f"{_WHOLE[module]}.{kind}", None
    return f"h.{found[1]}.{_OF_LAYER[found[2]]}.{kind}", _IN_QKV.get(found[2])


def _is_turned(name: str) -> bool:
    return name.endswith(("_proj.weight", "c_fc.weight"))
