"""Every field by its name, as `trtllm_runtime_flags`; NVIDIA's other names of a field are aliases of ours."""

from mpillm.fields import __getattr__ as __getattr__
