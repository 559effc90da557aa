"""`--requests_file`: a table with a row for each request of a test, as CSV or Parquet."""

from __future__ import annotations

import csv
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.data.dataset import Turns
from mpillm.files import naming
from mpillm.report.request_log import tpot_s

_PARQUET = ".parquet"


def check_requests_file(path: str) -> None:
    """Raise ConfigError if a table cannot be written to this path, as far as that is known before a test."""
    file = Path(path)
    if file.suffix not in (".csv", _PARQUET):
        problem = "name a file that ends in .csv or .parquet"
    elif not file.absolute().parent.is_dir():
        problem = f"there is no folder {file.parent}"
    elif file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        problem = "it cannot be written"
    elif file.suffix == _PARQUET and importlib.util.find_spec("pyarrow") is None:
        problem = "Parquet needs pyarrow: pip install 'mpillm[parquet]', or name a .csv"
    else:
        return
    raise ConfigError(f"--requests_file {path}: {problem}", about=["requests_file"])


def columns_of(
    rows: NDArray[np.void], turns: Turns | None = None, prompt_tokens: NDArray[np.int64] | None = None
) -> dict[str, list[Any]]:
    """Return the table's columns. A value that is not known is None.

    `rows`: `request_log.RECORD`; `prompt_tokens`: by sample, where a row does not have its own count.
    """
    columns: dict[str, list[Any]] = {"sample": rows["index"].tolist()}
    if turns is not None:
        number = np.searchsorted(turns.first, rows["index"], "right") - 1
        columns["conversation"] = [turns.conversations[i].name for i in number.tolist()]
        columns["session"] = rows["session"].tolist()  # a conversation may be sent several times
        columns["turn"] = rows["turn"].tolist()
        if turns.has_branches:
            parents = [one.parent and one.parent.name for one in turns.conversations]
            columns["parent"] = [parents[i] for i in number.tolist()]
    seconds = {
        "issued_s": rows["issued"],
        "ttft_s": rows["ttft"],
        "latency_s": rows["latency"],
        "tpot_s": tpot_s(rows),
    }
    for name, values in seconds.items():
        columns[name] = [round(one, 7) if np.isfinite(one) else None for one in values.tolist()]
    counts = rows["prompt"]
    if prompt_tokens is not None:
        counts = np.where(counts < 0, prompt_tokens[rows["index"]], counts)
    for name, values in (("prompt_tokens", counts), ("cached_tokens", rows["cached"])):
        columns[name] = [None if one < 0 else one for one in values.tolist()]
    columns["output_tokens"] = rows["tokens"].tolist()
    columns["error"] = (rows["error"] != 0).tolist()
    return columns


def write_requests_file(path: str, columns: Mapping[str, list[Any]]) -> None:
    """Write the table. Raises OSError with the file's name."""
    file = Path(path)
    with naming(file):
        if file.suffix == _PARQUET:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table(dict(columns)), file)
            return
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
