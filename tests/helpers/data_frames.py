"""Writes data frames as MLCommons publishes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray


def write_frame(file: Path, columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> None:
    """Write a pickled data frame: columns of objects (texts, lists of integers), and of numbers where they
    are numpy arrays."""
    series = {
        name: pd.Series(values, dtype=values.dtype if isinstance(values, np.ndarray) else object)
        for name, values in columns.items()
    }
    pd.DataFrame(series).to_pickle(file)
