"""For the unit tests: Hypothesis without a clock, and an MPI that leaves nothing behind."""

import os
import tempfile
from unittest import mock

from hypothesis import settings

# How long an example takes says nothing on a machine that does other work, too.
settings.register_profile("no clock", deadline=None)
settings.load_profile("no clock")

# Modules under test import MPI, which starts it. One process needs no shared memory: Open MPI would leave its
# 16 MB in /dev/shm, and its session folder in /tmp.
with (
    tempfile.TemporaryDirectory(prefix="mpillm-") as _folder,
    mock.patch.dict(os.environ, OMPI_MCA_btl="self", TMPDIR=_folder),
):
    from mpi4py import MPI  # noqa: F401
