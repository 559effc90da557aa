"""Compile a C file with the host's C compiler (`CC`, or `cc`), once for each kind of CPU."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpillm.files import cache_folder

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
# The library's OpenMP resolves by name to the OpenMP that PyTorch has loaded, so both share threads.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
_TIMEOUT_S = 60.0  # for a compiler that hangs
INT, POINTER = ctypes.c_int64, ctypes.c_void_p


def compiler() -> str | None:
    """Return the command of the C compiler, its path and any arguments, or None if there is none."""
    try:
        program, *arguments = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError:  # a quote without an end
        return None
    path = shutil.which(program)
    return None if path is None else shlex.join((path, *arguments))


def c_library(source: Path, *defined: str) -> ctypes.CDLL | None:
    """Compile `source` with macros (``NAME=VALUE``), or load it from the cache; return None if that fails."""
    if (command := compiler()) is None:
        _log.warning("there is no C compiler for %s, so steps take longer", source.name)
        return None
    flags = (*_FLAGS, *(f"-D{macro}" for macro in defined))
    try:
        return _compiled(command, source, flags)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home folder
        message = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else str(error)
        _log.warning(
            "%s is not compiled, so steps take longer: %s: %s", source.name, command, message.strip()
        )
        return None


def c_function(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    """Return a function of a library, which takes arguments of these C types and returns nothing."""
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, None
    return function


def address(x: Tensor) -> int:
    """Return the address of a contiguous tensor's data."""
    assert x.is_contiguous()
    return x.data_ptr()


def _compiled(command: str, source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Compile with `command`, in half a second, and cache the result for this kind of CPU."""
    program, *arguments = shlex.split(command)
    flags = (*arguments, *flags)
    # The source with its includes, and the compiler's own macros: the compiler's version and the CPU's
    # instructions.
    about = _output_of(program, *flags, "-dD", "-E", "-P", str(source))
    name = hashlib.sha256(about + " ".join(flags).encode()).hexdigest()[:32]
    folder = cache_folder()
    library = folder / f"{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            output = Path(scratch) / library.name
            _output_of(program, *flags, str(source), "-o", str(output), "-lm")
            output.replace(library)  # atomic: other ranks may load it
    return ctypes.CDLL(str(library))


def _output_of(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S).stdout
