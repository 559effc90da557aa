"""DeepSeek's draft layer: like the model's, but it reads a token's embedding and a hidden state.

DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.2. Row i of a sequence is token i + 1 with the
hidden state of token i: the model's last hidden state, normed. After a draft token, the hidden state is this
layer's own output for the previous row, normed by the layer's own head, as in TensorRT-LLM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpillm.engine.kernels.linear import Linear
from mpillm.engine.model.decoder import Decoder
from mpillm.engine.model.layers import AddRmsNorm
from mpillm.engine.model.step_parts import Attention, LayerStored, Ops
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.shape.layout import ALL, RankLayout
from mpillm.engine.shape.mtp_config import MtpConfig
from mpillm.engine.weights.rank_weights import Shards
from mpillm.engine.weights.sources import Checkpoint

_LAYER = "model.layers.0."


class MtpHead(Decoder):
    """A model of one layer whose rows also read `hidden`."""

    in_parts = False

    def __init__(
        self, mtp: MtpConfig, embedding: Tensor, max_seq_len: int, dtype: torch.dtype, ops: Ops, max_rows: int
    ) -> None:
        """See `EagleHead`."""
        source = _DraftLayer(mtp, embedding)
        weights = Shards(source, mtp.model, RankLayout(), dtype, embedding.device, mtp.quantization)
        super().__init__(mtp.model, weights, max_seq_len, Groups(), ops)
        self.hidden = embedding.new_zeros(max_rows, mtp.model.hidden_size, dtype=dtype)  # as `EagleHead`'s
        self._embedding_norm, self._hidden_norm = (
            AddRmsNorm(weights.get(f"{_LAYER}{name}"), self.config.rms_norm_eps, ops)
            for name in ("enorm", "hnorm")
        )
        self._eh = Linear(weights.get(f"{_LAYER}eh_proj"))

    def fuse(self, features: Tensor) -> Tensor:
        """Return the model's hidden states [rows, hidden] from `Features.rows`: as they are."""
        return features

    def forward(
        self, x: Tensor, attention: Attention, logits_rows: Tensor | None, layer_stored: LayerStored = None
    ) -> Tensor:
        """Run a step (see `Decoder.forward`); there is no handoff."""
        both = [self._embedding_norm(x), self._hidden_norm(self.hidden[: len(x)])]
        out = super().forward(self._eh(torch.cat(both, dim=1)), attention, logits_rows)
        self.hidden[: len(out)] = out
        return out


class _DraftLayer:
    """Implements `WeightSource`: the layer's tensors, under the names that they would have in a model."""

    def __init__(self, mtp: MtpConfig, embedding: Tensor) -> None:
        self._checkpoint = Checkpoint(mtp.folder, mtp.full_model)
        self._embedding = embedding
        self._prefix = f"model.layers.{mtp.full_model.n_layers}."

    def get(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        if name.startswith(_LAYER):
            stored = self._prefix + name.removeprefix(_LAYER)
        elif name == "model.embed_tokens.weight":
            return self._embedding
        else:
            head = {"model.norm.weight": "norm.weight", "lm_head.weight": "head.weight"}[name]
            stored = f"{self._prefix}shared_head.{head}"
        return self._checkpoint.get(stored, rows, columns)
