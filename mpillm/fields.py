"""Every option by its name, as configuration files import it: `mpillm.fields.max_batch_size`."""

from __future__ import annotations

from typing import Any

from mpillm.options import fields


def __getattr__(name: str) -> Any:
    return getattr(fields, name)
