"""The draft layer after a model's last layer (multi-token prediction), read and checked without torch.

DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.2. A checkpoint has it as one more layer. `eh_proj`
makes the layer's input from the next token's embedding (normed by `enorm`) and the token's hidden state in
the model (normed by `hnorm`). `shared_head` has a norm and the model's own head. The model itself computes
without this layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about
from mpillm.engine.shape.checkpoint_folder import checkpoint_files
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.speculative_config import MTP, read_speculation


@dataclass(frozen=True)
class MtpConfig:
    """A draft layer's configuration, before it is loaded."""

    folder: Path  # the model's
    full_model: ModelConfig  # with this layer
    model: ModelConfig  # of this layer alone
    quantization: str  # of its products, as the model's: see `ModelInfo`

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that it reads: `n_layers`, which stands for the last layer's normed output."""
        return (self.full_model.n_layers,)


@about("speculative_config", "model_path")
def mtp_config(
    config: EngineConfig, raw: Mapping[str, Any], target: ModelConfig, folder: Path | None, quantization: str
) -> MtpConfig | None:
    """Return the draft layer of `target`, whose config.json is `raw`; None if the instance does not use one.

    Raises ConfigError if the model has none.
    """
    how = read_speculation(config)
    if how is None or how.decoding_type != MTP:
        return None
    why = ""
    if target.latent is None:
        why = "it is no DeepSeek V3"
    elif config.engine_dir is not None:
        why = "a built engine has not got it"
    elif folder is None or config.load_format == "dummy":
        why = "random weights have none"
    elif (n := raw.get("num_nextn_predict_layers", 0)) != 1:
        why = f"num_nextn_predict_layers of its config.json is {str(n)[:20]}, and can be 1"
    if why:
        raise ConfigError(
            f"--speculative_config decoding_type {MTP}: {config.model_path} has no layer that guesses ({why})"
        )
    assert folder is not None
    full_model = replace(target, n_draft_layers=1)
    checkpoint_files(folder, full_model)
    model = replace(target, n_layers=1, n_dense_layers=0, windows=(), tie_word_embeddings=False)
    return MtpConfig(folder, full_model, model, quantization)
