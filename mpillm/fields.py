"""Every option by its name, as configuration files import it: `mpillm.fields.max_batch_size`."""

from __future__ import annotations

from disagg.errors import nearest
from mpillm.options.field import Field as Field
from mpillm.options.fields import BY_NAME
from mpillm.options.parsers import integers as integers
from mpillm.options.parsers import not_negative as not_negative
from mpillm.options.parsers import one_or_two as one_or_two
from mpillm.options.parsers import positive as positive
from mpillm.options.parsers import seconds as seconds


def __getattr__(name: str) -> Field:
    """Return a field, by its name or an alias."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise AttributeError(f"there is no field {name}{nearest(name, BY_NAME)}") from None
