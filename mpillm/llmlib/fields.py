"""Every field by its name, as `trtllm_runtime_flags`; NVIDIA's other names of a field are aliases of ours."""

from __future__ import annotations

from disagg.errors import nearest
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME


def __getattr__(name: str) -> Field:
    if name not in BY_NAME:
        raise AttributeError(f"mpillm has no field {name}{nearest(name, BY_NAME)}")
    return BY_NAME[name]
