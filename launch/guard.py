"""Process between MPICH's launcher and a rank: ``python guard.py COMMAND…`` always ends with an exit code.

Hydra kills every rank of a node when a signal kills one of its children, even with
``-disable-auto-cleanup`` (``WIFSIGNALED`` in its proxy). Hydra would then also kill rank 0 before it reports
the lost rank. With this process in between, hydra receives a plain exit code of 128 + signal.

This file is run by path with ``python -I -S``. It imports no module of mpillm, and starts in about 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
KEEPER = b"mpillm-kept"  # launch.prctl.KEEPER: this process has a rank's environment, but is not a rank
FORWARDED_BY_HYDRA = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def main(command: list[str]) -> int:
    """Run `command`, wait for it, and return its exit code: 128 + signal if a signal ended it."""
    # Hydra signals the process group. The rank also gets the signal, so this process only has to survive it.
    for number in FORWARDED_BY_HYDRA:
        signal.signal(number, lambda _number, _frame: None)
    # After the loss of a rank, Hydra sends the others SIGUSR1, whose default action would end a rank that is
    # still importing.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        # Hydra gives every rank a pipe as its standard input, and closes only rank 0's.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in FORWARDED_BY_HYDRA:
            signal.signal(number, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"mpillm: can't start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, KEEPER, 0, 0, 0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
