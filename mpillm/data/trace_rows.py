"""Rows of a trace whose columns have other names than Mooncake's, as rows with Mooncake's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from disagg.errors import ConfigError, nearest
from mpillm.files import excerpt
from mpillm.options.trace_columns import MILLISECONDS, OUTPUT_LENGTH, TIMESTAMP, UNIT

_MAX_NAMES = 300  # characters of a row's columns in a message


def renamed_rows(
    rows: Iterable[tuple[str, Any]], columns: Mapping[str, str], left_out: list[str]
) -> Iterator[tuple[str, Any]]:
    """Yield rows, each with its place, with Mooncake's names for the columns, and milliseconds.

    `columns`: see `trace_columns`. `left_out` gets the places of rows without output tokens, such as the
    failed requests of BurstGPT's trace. Raises ConfigError for a row without one of the columns.
    """
    scale = MILLISECONDS[columns.get(UNIT, "ms")]
    names = {key: column for key, column in columns.items() if key != UNIT}
    for where, row in rows:
        try:
            new = _renamed(row, names)
            if TIMESTAMP in new:
                new[TIMESTAMP] = _scaled(new[TIMESTAMP], scale, names.get(TIMESTAMP, TIMESTAMP))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}", about=["trace_columns"]) from error
        if new.get(OUTPUT_LENGTH) in (0, "0"):
            left_out.append(where)
        else:
            yield where, new


def _renamed(row: Any, names: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{excerpt(row)} has no columns, which --trace_columns names")
    if missing := [column for column in names.values() if column not in row]:
        names_of_row = [str(key) for key in row]
        known = ", ".join(names_of_row)[:_MAX_NAMES]
        raise ValueError(f"no column {missing[0]}{nearest(missing[0], names_of_row)}; there are {known}")
    replaced = {*names, *names.values()}
    return {
        **{key: value for key, value in row.items() if key not in replaced},
        **{key: row[column] for key, column in names.items()},
    }


def _scaled(value: Any, scale: float, column: str) -> float:
    try:
        return float(value) * scale
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{column} is {excerpt(value)}; must be a number") from None
