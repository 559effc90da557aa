"""Every field by its name, such as `trtllm_runtime_flags`. NVIDIA's other names are aliases."""

from mpillm.fields import __getattr__ as __getattr__
