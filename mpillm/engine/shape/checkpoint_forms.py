"""Checkpoints whose tensors are not the parameters: other names or order, or several parameters in one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from mpillm.engine.shape.dtypes import STORED
from mpillm.engine.shape.entries import BLOCK, Entry, blocks_name, scale_name
from mpillm.engine.shape.int4 import in_units, int4_form
from mpillm.engine.shape.layout import ALL
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.tensor_shapes import tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from mpillm.engine.shape.int4 import Read

_BYTES = BLOCK // 2
_BLOCKS, _SCALES = blocks_name("weight"), scale_name("weight")
_NAME = re.compile(
    rf"(.+[.]experts)[.](\d+)[.](gate_proj|up_proj|down_proj)[.](weight|bias|{_BLOCKS}|{_SCALES})"
)


class PackedExperts:
    """Implements `checkpoint_forms.Form`: a tensor holds the parameters of all experts of a layer."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._last: tuple[tuple[str, int], Tensor] | None = None  # last matrix read: gate and up share it

    def holds(self, name: str) -> bool:
        """Return whether a parameter is an expert's."""
        return _NAME.fullmatch(name) is not None

    def entries(self) -> dict[str, Entry]:
        """Return the tensors of all layers' experts."""
        model, entries = self._model, dict[str, Entry]()
        n, h, inner = model.n_experts, model.hidden_size, model.intermediate_size
        for layer in range(model.n_layers):
            for part, n_out, n_in in (("gate_up_proj", 2 * inner, h), ("down_proj", h, inner)):
                name = f"model.layers.{layer}.mlp.experts.{part}"
                if model.stored == "mxfp4":
                    entries[f"{name}_blocks"] = Entry("U8", (n, n_out, n_in // BLOCK, _BYTES))
                    entries[f"{name}_scales"] = Entry("U8", (n, n_out, n_in // BLOCK))
                else:
                    entries[name] = Entry(STORED[model.dtype], (n, n_in, n_out))
                entries[f"{name}_bias"] = Entry(STORED[model.dtype], (n, n_out))
        return entries

    def get(self, name: str, rows: slice, columns: slice, read: Read) -> Tensor:
        """Return a part of a parameter (see `WeightSource.get`)."""
        match = _NAME.fullmatch(name)
        assert match is not None
        prefix, expert, part, kind = match[1], int(match[2]), match[3], match[4]
        every = ALL if part == "down_proj" else slice(part == "up_proj", None, 2)
        stored = f"{prefix}.{part if part == 'down_proj' else 'gate_up_proj'}"
        if kind == "bias":
            return _one(read, f"{stored}_bias", expert)[every][rows].contiguous()
        if kind == _BLOCKS:
            blocks = _one(read, f"{stored}_blocks", expert)[every][rows]
            return blocks[:, in_units(columns, BLOCK)].flatten(1)
        if kind == _SCALES:
            return _one(read, f"{stored}_scales", expert)[every][rows][
                :, in_units(columns, BLOCK)
            ].contiguous()
        if self._last is None or self._last[0] != (stored, expert):
            self._last = (stored, expert), self._matrix(stored, expert, read)
        return self._last[1][every][rows][:, columns].contiguous()

    def _matrix(self, name: str, expert: int, read: Read) -> Tensor:
        """Return one expert's matrix as floats: [out, in]."""
        from mpillm.engine.shape.mxfp4 import widened

        if self._model.stored != "mxfp4":
            return _one(read, name, expert).t()
        return widened(_one(read, f"{name}_blocks", expert).flatten(1), _one(read, f"{name}_scales", expert))


def _one(read: Read, name: str, expert: int) -> Tensor:
    return read(name, slice(expert, expert + 1), ALL)[0]


_GLOBAL_NAMES = {
    "model.embed_tokens": "wte",
    "model.embed_positions": "wpe",
    "model.norm": "ln_f",
    "lm_head": "lm_head",
}
_LAYER_NAMES = {
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
        entries: dict[str, Entry] = {}
        for name, shape in tensor_shapes(self._model).items():
            stored, place = _place(name)
            n_out = shape[0] if place is None else 3 * shape[0]
            turned = (*shape[1:], n_out) if _is_turned(name) else (n_out, *shape[1:])
            entries[stored] = Entry(STORED[self._model.dtype], turned)
        return entries

    def get(self, name: str, rows: slice, columns: slice, read: Read) -> Tensor:
        stored, place = _place(name)
        if place is not None:
            n = self._model.hidden_size
            start, stop, _ = rows.indices(n)
            rows = slice(place * n + start, place * n + stop)
        if _is_turned(name):
            return read(stored, columns, rows).t().contiguous()
        return read(stored, rows, columns if name.endswith(".weight") else ALL)


def _place(name: str) -> tuple[str, int | None]:
    """Return a parameter's name in the checkpoint, and which third of the tensor it is, or None."""
    module, _, kind = name.rpartition(".")
    if (match := _LAYER.fullmatch(module)) is None:
        return f"{_GLOBAL_NAMES[module]}.{kind}", None
    return f"h.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}", _IN_QKV.get(match[2])


def _is_turned(name: str) -> bool:
    return name.endswith(("_proj.weight", "c_fc.weight"))


class Form(Protocol):
    """How a model's checkpoint holds some of its parameters."""

    def holds(self, name: str) -> bool:
        """Return whether a parameter is stored in this form."""
        ...

    def entries(self) -> dict[str, Entry]:
        """Return the tensors that hold these parameters."""
        ...

    def get(self, name: str, rows: slice, columns: slice, read: Read) -> Tensor:
        """Return a part of a parameter, from parts of tensors that `read` returns."""
        ...


def form_of(model: ModelConfig) -> Form | None:
    """Return the form of a model's checkpoint; None: its tensors are the parameters."""
    if model.quantization == "int4":
        return int4_form(model)
    forms: dict[str, type[Gpt2Names | PackedExperts]] = {"gpt2": Gpt2Names, "packed experts": PackedExperts}
    form = forms.get(model.family.checkpoint)
    return None if form is None else form(model)
