"""A rank's part of a model in the memory of its device: weights and KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mpillm.engine.cache.host_cache import HostCache
from mpillm.engine.cache.kv_cache import KVCache
from mpillm.engine.cache.two_caches import TwoCaches
from mpillm.engine.kernels import ops
from mpillm.engine.model.decoder import Decoder, Features
from mpillm.engine.model.step_parts import Ops
from mpillm.engine.parallel.groups import Groups, MpiGroups
from mpillm.engine.shape.dtypes import torch_dtype
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.model_info import ModelInfo
from mpillm.engine.weights.rank_weights import open_weights


class ModelPart:
    """Weights and caches of a rank; no state of sequences."""

    def __init__(
        self,
        info: ModelInfo,
        tokens_per_block: int,
        groups: Groups,
        model: Decoder,
        dtype: torch.dtype,
        kv_scales: Tensor | None = None,
    ) -> None:
        """`dtype`: of rows, and of weights that are not quantized; `kv_scales`: of an fp8 cache."""
        config, layout = info.config, groups.layout
        self.info = info
        self.groups = groups
        self.peers = groups if isinstance(groups, MpiGroups) else None  # None on an instance's only rank
        self.model = model
        self.device = model.rotations.device
        self.n_heads = layout.n_heads(config)
        self.dtype = dtype
        kv_heads = layout.kv_heads(config)
        # For each layer of this stage: whether it uses the window cache, and its index in its cache.
        is_windowed = [
            info.window_cache_tokens > 0 and config.window(layer) > 0 for layer in layout.layers(config)
        ]
        self.places = [(windowed, is_windowed[:i].count(windowed)) for i, windowed in enumerate(is_windowed)]

        def cache(windowed: bool, n_tokens: int) -> KVCache:
            own_layers = [i for i, one in enumerate(is_windowed) if one == windowed]
            return KVCache(
                len(own_layers),
                n_tokens // tokens_per_block,
                kv_heads.stop - kv_heads.start,
                tokens_per_block,
                config.head_dim,
                torch_dtype(info.kv_dtype),
                self.device,
                None if kv_scales is None else kv_scales[own_layers],
                config.kv_parts,
            )

        with torch.inference_mode():
            self.cache = cache(False, info.kv_cache_tokens)
            self.host_cache = HostCache(self.cache, info.host_blocks) if info.host_blocks else None
            # The cache of layers with a window, if it is not `cache` (see `WindowBlocks`).
            self.window_cache = cache(True, info.window_cache_tokens) if info.window_cache_tokens else None

    @property
    def handed_over(self) -> KVCache | TwoCaches:
        """The caches that handoffs read and write."""
        if self.window_cache is None:
            return self.cache
        return TwoCaches((self.cache, self.window_cache), self.places)

    @classmethod
    def load(
        cls, config: EngineConfig, info: ModelInfo, groups: Groups, *, device: str = "cpu", ops: Ops = ops
    ) -> ModelPart:
        """Load the weights, in minutes for a large model. Raises ConfigError as `open_weights` does."""
        with torch.inference_mode():
            weights = open_weights(info, groups.layout, device, dummy=config.load_format == "dummy")
            model = Decoder(info.config, weights, info.max_seq_len, groups, ops)
            layers = groups.layout.layers(info.config)
            scales = weights.kv_scales(layers) if info.kv_dtype == "fp8" else None
            if info.feature_layers:
                width = len(info.feature_layers) * info.config.hidden_size
                rows = torch.zeros(info.feature_rows, width, dtype=weights.dtype, device=device)
                model.keep_features(Features(info.feature_layers, rows))
        return cls(info, config.scheduler.tokens_per_block, groups, model, weights.dtype, scales)

    def receive_hidden(self, n_rows: int) -> Tensor:
        """Return the rows of a step from the previous stage: [n_rows, hidden]."""
        assert self.peers is not None
        return self.peers.receive_hidden(n_rows, self.info.config.hidden_size, self.dtype, self.device)
