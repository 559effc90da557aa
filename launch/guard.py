"""Process between MPICH's launcher and a rank: ``python guard.py COMMAND…`` always ends with an exit code.

Hydra kills every rank of a node when a signal kills one of its children, even with
``-disable-auto-cleanup`` (``WIFSIGNALED`` in its proxy). Hydra would then also kill rank 0 before it reports
the lost rank. With this process in between, hydra receives a plain exit code of 128 + signal.

Hydra sends SIGUSR1 to the ranks that remain after a loss, so ranks ignore it. This process knows the sender,
so it passes on the warning signal of a batch system.

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
_AWAITED = (signal.SIGCHLD, signal.SIGUSR1)


def main(command: list[str]) -> int:
    """Run `command`, wait for it, and return its exit code: 128 + signal if a signal ended it."""
    # Hydra signals the process group. The rank also gets the signal, so this process only has to survive it.
    for number in FORWARDED_BY_HYDRA:
        signal.signal(number, lambda _number, _frame: None)
    # After the loss of a rank, Hydra sends the others SIGUSR1, whose default action would end a rank that is
    # still importing.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    hydra, parent = os.getppid(), os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
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
    code = os.waitstatus_to_exitcode(_wait(child, hydra))
    return code if code >= 0 else 128 - code


def _wait(child: int, hydra: int) -> int:
    """Return the child's status when it has ended. Until then, pass on SIGUSR1 unless `hydra` has sent it."""
    if sys.platform != "linux":
        return os.waitpid(child, 0)[1]
    while True:
        received = signal.sigwaitinfo(_AWAITED)
        if received.si_signo == signal.SIGUSR1 and received.si_pid != hydra:
            _write_signal(signal.SIGUSR1)
            os.kill(child, signal.SIGUSR2)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status


def _write_signal(number: int) -> None:
    """Do as `launch.environment.write_signal`: the rank reports this signal, not the one that it gets."""
    from contextlib import suppress  # their import takes longer than this process's start
    from pathlib import Path

    with suppress(OSError, KeyError):  # such as a full disk: the rank reports SIGUSR2
        path = Path(os.environ["MPILLM_EXIT_FILE"]).with_name("signal")
        draft = path.with_name(f"signal.{os.uname().nodename}.{os.getpid()}")  # all ranks' guards write
        draft.write_text(str(int(number)), encoding="utf-8")
        draft.replace(path)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
