"""Base class of data sets, which provide the samples of a test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.data.preprocessed.converted import load_npy
from mpillm.options.fields import AllFields
from mpillm.options.mitten import autoconfigure, bind, configured

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpillm.options.run_config import RunConfig


@dataclass(frozen=True)
class Samples:
    """Samples, whose prompts are back to back in `tokens`: sample i's has ``lengths[i]`` tokens."""

    file: Path  # source of the prompts, for messages
    lengths: NDArray[np.int64]
    tokens: NDArray[np.int32]
    stop_words: NDArray[np.int32] | None = None  # shape [samples, width], padded with the end token or -1
    note: str = ""  # for the user: the place of the converted data set


@autoconfigure
@bind(AllFields.dataset_path)
class LLMDataLoader:
    """A data set. A subclass defines the number of samples and their tokens.

    ``--dataset package.module:Class`` runs a test with a subclass.
    """

    def __init__(self, fnames: Iterable[str | Path] = (), *, dataset_path: str | Path | None = None) -> None:
        """Map the .npy files `fnames` of a folder. Each becomes an attribute with its name without suffix.

        `dataset_path`: the folder; None: the current folder.
        """
        self.dataset_path = Path(dataset_path or ".")
        self.tensors: dict[str, NDArray[Any]] = {}
        for name in fnames:
            try:
                array = load_npy(self.dataset_path / name, is_mapped=True)
            except (OSError, ValueError, EOFError) as error:
                raise ConfigError(f"data set {self.dataset_path / name} cannot be read: {error}") from None
            if not isinstance(array, np.ndarray):
                raise ConfigError(f"data set {self.dataset_path / name}: an archive of arrays")
            self.tensors[Path(name).stem] = array

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the data set for a run. Parameters that are bound to options get the run's values."""
        return configured(cls, config)

    def __getattr__(self, name: str) -> NDArray[Any]:
        try:
            return self.__dict__["tensors"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name}, and has loaded no file {name}.npy"
            ) from None

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError(f"{type(self).__name__}.__len__")

    def get_input_tokens(self, sample_indices: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the prompts of these samples."""
        raise NotImplementedError(f"{type(self).__name__}.get_input_tokens")

    def get_stop_tokens(self, sample_indices: Sequence[int]) -> Sequence[Sequence[int] | None]:
        """Return the tokens of each sample's stop word; None: no stop word."""
        return [None for _ in sample_indices]

    def load(self) -> Samples:
        """Return all samples. Raises ConfigError for a sample without tokens, or a wrong number of them."""
        name, every = type(self).__name__, range(len(self))
        prompts, stop_words = self.get_input_tokens(every), self.get_stop_tokens(every)
        for method, got in (("get_input_tokens", prompts), ("get_stop_tokens", stop_words)):
            if len(got) != len(every):
                raise ConfigError(f"{name}.{method} returned {len(got)} samples instead of {len(every)}")
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        if not len(lengths):
            raise ConfigError(f"{name} has no samples")
        if not lengths.all():
            raise ConfigError(f"{name}: sample {int(np.argmin(lengths))} has no tokens")
        tokens = np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts])
        return Samples(Path(name), lengths, tokens, _padded(stop_words))


def _padded(stop_words: Sequence[Sequence[int] | None]) -> NDArray[np.int32] | None:
    if all(word is None for word in stop_words):
        return None
    tokens = [[] if word is None else list(word) for word in stop_words]
    rows = np.full((len(tokens), max(map(len, tokens), default=0)), -1, np.int32)
    for row, word in zip(rows, tokens, strict=True):
        row[: len(word)] = word
    return rows
