"""Values of `--trace_columns`: the columns of a trace that has other names than Mooncake's."""

from __future__ import annotations

from typing import Any

from disagg.errors import nearest
from mpillm.options.field import Reason
from mpillm.options.parsers import expects

TIMESTAMP, INPUT_LENGTH, OUTPUT_LENGTH, UNIT = "timestamp", "input_length", "output_length", "timestamp_unit"
MILLISECONDS = {"s": 1000.0, "ms": 1.0}  # of each unit of time stamps
_KEYS = (TIMESTAMP, INPUT_LENGTH, OUTPUT_LENGTH, "hash_ids", "session_id", UNIT)


def _joined(value: Any) -> str:
    return ",".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, dict) else str(value)


@expects("key=column,key=column, such as timestamp=Timestamp,input_length=Request tokens", _joined)
def trace_columns(text: str) -> dict[str, str]:
    """Return the column of each key that is not named like its column, and the unit of time stamps."""
    columns: dict[str, str] = {}
    for pair in text.split(","):
        key, _, column = (part.strip() for part in pair.partition("="))
        if key not in _KEYS:
            raise Reason(f"no key {key!r}{nearest(key, _KEYS)}: {', '.join(_KEYS)}")
        if not column or key in columns:
            raise Reason(f"{key} {'occurs twice' if key in columns else 'has no column'}")
        columns[key] = column
    if columns.get(UNIT, "ms") not in MILLISECONDS:
        raise Reason(f"{UNIT}={columns[UNIT]}: must be {' or '.join(MILLISECONDS)}")
    return columns
