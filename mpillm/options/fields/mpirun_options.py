"""The option of commands that start their own mpirun."""

from __future__ import annotations

from mpillm.options.field import Field
from mpillm.options.parsers import shell_args

MPIRUN_OPTIONS = Field(
    "mpirun_options",
    'further options for mpirun, as one text: "--hostfile hosts"',
    shell_args,
    default=(),
    group="runs",
)
