"""Values of `--trace_columns`: the columns of a trace that has other names than Mooncake's."""

from __future__ import annotations

from mpillm.options.field import Reason
from mpillm.options.parsers import expects, joined_key_values, key_values

TIMESTAMP, INPUT_LENGTH, OUTPUT_LENGTH, UNIT = "timestamp", "input_length", "output_length", "timestamp_unit"
MILLISECONDS = {"s": 1000.0, "ms": 1.0}  # of each unit of time stamps
_KEYS = (TIMESTAMP, INPUT_LENGTH, OUTPUT_LENGTH, "hash_ids", "session_id", UNIT)


@expects("key=column,key=column, such as timestamp=Timestamp,input_length=Request tokens", joined_key_values)
def trace_columns(text: str) -> dict[str, str]:
    """Return the column of each key that is not named like its column, and the unit of time stamps."""
    columns = key_values(text, _KEYS)
    if missing := [key for key, column in columns.items() if not column]:
        raise Reason(f"{missing[0]} has no column")
    if columns.get(UNIT, "ms") not in MILLISECONDS:
        raise Reason(f"{UNIT}={columns[UNIT]}: must be {' or '.join(MILLISECONDS)}")
    return columns
