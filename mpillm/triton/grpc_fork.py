"""Disables gRPC's fork handlers. Import this module before gRPC.

In a child process, the handlers start gRPC's threads again. These use descriptors that the child closes
before its program starts, and then abort it: two children of a hundred. No child uses its parent's gRPC.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
