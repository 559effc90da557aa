"""The baseline: vLLM for CPUs, in a Python environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import vllm_process
from disagg.errors import ConfigError
from launch.children import Children
from launch.environment import clean_environment

_DEADLINE_S = 900.0  # for loading, and for a turn: vLLM compiles at its first start, for minutes
_LOOK_S = 0.2
_LAST_WORDS_S = 60.0  # for a process that has left, until its output is complete


class VllmBaseline:
    """A model that answers greedily, each answer of the same length.

    vLLM's processes look for work all the time, so between turns they are suspended.
    """

    def __init__(self, python: str, children: Children, folder: Path, n_threads: int, **options: Any) -> None:
        """Start vLLM and load the model: minutes.

        `folder`: for a socket and the log. `options`: of `vllm.LLM`. Raises ConfigError if that fails.
        """
        if shutil.which(python) is None:
            raise ConfigError(
                f"--vllm_python {python}: there is no such program; it is the Python of an environment with"
                " vLLM for CPUs (make test-peers makes .venv-peers)"
            )
        self._children = children
        cores = sorted(os.sched_getaffinity(0))[:n_threads]
        environment = {
            **clean_environment(os.environ),
            # Tools that vLLM compiles with are beside its Python.
            "PATH": f"{Path(python).absolute().parent}{os.pathsep}{os.environ['PATH']}",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        address = folder / "vllm.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen()
            listener.settimeout(_LOOK_S)
            command = (python, "-I", str(vllm_process.__file__), str(address))
            self._child = children.start("vLLM", command, environment, folder / "vllm.log")
            deadline = time.monotonic() + _DEADLINE_S
            while True:
                try:
                    connection, _ = listener.accept()
                    break
                except TimeoutError:
                    if self._child.process.poll() is not None or time.monotonic() > deadline:
                        raise self._failed("did not start") from None
        with connection:
            connection.settimeout(_DEADLINE_S)
            self._lines = connection.makefile("rw", encoding="utf-8")
        self.versions: str = self._ask(options)

    def answer(self, prompts: list[list[int]], n_output: int) -> list[list[int]]:
        """Answer all prompts, given at once: vLLM batches them."""
        self._signal("resume")
        answers: list[list[int]] = self._ask({"prompts": prompts, "n_output": n_output})
        self._signal("suspend")
        return answers

    def close(self) -> None:
        """End it."""
        self._signal("resume")
        self._lines.close()

    def _ask(self, what: object) -> Any:
        """Send a line, and return what comes back."""
        try:
            self._lines.write(json.dumps(what) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        except TimeoutError:
            raise self._failed(f"has not answered in {_DEADLINE_S:.0f} s") from None
        except OSError:  # it ends, or has
            line = ""
        if not line:
            self._children.wait(self._child, _LAST_WORDS_S)
            raise self._failed("ended")
        return json.loads(line)

    def _signal(self, what: str) -> None:
        process = psutil.Process(self._child.process.pid)
        for each in (process, *process.children(recursive=True)):
            getattr(each, what)()

    def _failed(self, what: str) -> ConfigError:
        return ConfigError(f"--against vllm: vLLM {what}; the end of its output:\n{self._child.tail()}")
