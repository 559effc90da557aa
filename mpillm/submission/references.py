"""The reference answers: columns of a workload's data set."""

from __future__ import annotations

from pathlib import Path

from disagg.errors import ConfigError
from mpillm.data.preprocessed.loader import loader_of
from mpillm.data.row_files import read_rows
from mpillm.submission.scores import Row
from mpillm.workloads import Workload


def read_references(workload: Workload, file: str) -> list[Row]:
    """Read the workload's reference columns of every sample, in the order of the data set.

    `file`: the published data frame, its folder, or a JSONL file. Raises ConfigError, with the file and the
    line or missing column.
    """
    path, columns = Path(file), workload.columns.references
    if path.suffix != ".jsonl":
        read = loader_of(path, workload).references()
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*(read[column] for column in columns), strict=True)
        ]
    rows: list[Row] = []
    for number, entry in read_rows(path):
        try:
            rows.append({column: str(entry[column]) for column in columns})
        except TypeError as error:
            raise ConfigError(f"{path}:{number}: not a JSON object: {error}") from error
        except KeyError as error:
            raise ConfigError(
                f"{path}:{number}: no field {error}, which this workload's accuracy needs"
            ) from error
    return rows
