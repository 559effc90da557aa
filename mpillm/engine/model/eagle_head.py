"""An EAGLE-3 head: a draft layer, which reads a token's embedding and the previous token's hidden state.

Li et al., EAGLE-3, 2025. Row i of a sequence is token i + 1 with the hidden state of token i: the outputs of
three layers of the model, `fuse`d into one vector. After a draft token, the hidden state is the head's own
output for the previous row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpillm.engine.kernels.linear import Linear
from mpillm.engine.model.decoder import Decoder
from mpillm.engine.model.layers import AddRmsNorm
from mpillm.engine.model.step_parts import Attention, LayerStored, Ops
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.shape.eagle_config import LAYER, EagleConfig
from mpillm.engine.shape.layout import ALL, RankLayout
from mpillm.engine.weights.rank_weights import Shards
from mpillm.engine.weights.sources import OpenFiles


class EagleHead(Decoder):
    """A model of one layer whose rows also read `hidden`. Its logits are over the model's vocabulary."""

    in_parts = False

    def __init__(
        self,
        eagle: EagleConfig,
        embedding: Tensor,
        max_seq_len: int,
        dtype: torch.dtype,
        ops: Ops,
        max_rows: int,
    ) -> None:
        """`embedding` [vocabulary, hidden]: the model's; `max_rows`: of a step.

        Raises ConfigError if a tensor cannot be read.
        """
        source = _HeadFile(eagle, embedding)
        weights = Shards(source, eagle.model, RankLayout(), dtype, embedding.device)
        super().__init__(eagle.model, weights, max_seq_len, Groups(), ops)
        # Before a step, the hidden state that each row reads, in the first rows. After the step, the head's
        # outputs. The memory stays in place for CUDA graphs.
        self.hidden = embedding.new_zeros(max_rows, eagle.model.hidden_size, dtype=dtype)
        self._fc = Linear(weights.get("fc"))
        self._hidden_norm = AddRmsNorm(weights.get(f"{LAYER}hidden_norm"), self.config.rms_norm_eps, ops)
        self._norm_before_residual = eagle.norm_before_residual
        self._vocab_size = eagle.vocab_size
        self._tokens: Tensor | None = None  # the model's token for each token of the head
        if "d2t" in eagle.names:
            added = source.get("d2t").to(embedding.device)
            self._tokens = torch.arange(len(added), device=embedding.device) + added

    def fuse(self, features: Tensor) -> Tensor:
        """Return the model's hidden states [rows, hidden] from `Features.rows`."""
        return self._fc(features)

    def forward(
        self, x: Tensor, attention: Attention, logits_rows: Tensor | None, layer_stored: LayerStored = None
    ) -> Tensor:
        """Run a step (see `Decoder.forward`); there is no handoff."""
        layer, residual = self.layers[0], self.hidden[: len(x)]
        normed = self._hidden_norm(residual)
        if self._norm_before_residual:
            residual = normed.clone()
        attended = attention(0, layer.attention.qkv(torch.cat([layer.norm(x), normed], dim=1)))
        if logits_rows is not None:
            residual, attended = residual.index_select(0, logits_rows), attended.index_select(0, logits_rows)
        out = self.leave(residual, attended, None)
        if logits_rows is not None or self._norm_before_residual:
            self.hidden[: len(residual)] = residual
        return out

    def logits(self, normed: Tensor) -> Tensor:
        own = super().logits(normed)
        if self._tokens is None:
            return own
        full = own.new_full((len(own), self._vocab_size), -torch.inf)
        return full.index_copy_(1, self._tokens, own)


class _HeadFile:
    """Implements `WeightSource`: a head's tensors, under the names that they would have in a model."""

    def __init__(self, eagle: EagleConfig, embedding: Tensor) -> None:
        self._eagle = eagle
        self._embedding = embedding
        self._files = OpenFiles()

    def get(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return a tensor, always whole: a head is on one rank."""
        if not name.startswith(LAYER):
            name = name.removeprefix("model.")
        if name not in self._eagle.names:
            return self._embedding
        return self._files.read(*self._eagle.names[name])
