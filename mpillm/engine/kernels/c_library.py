"""Compile a C file where there is a C compiler (`CC`, or `cc`), once for each kind of CPU."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mpillm.files import cache_folder

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
# The compiler's OpenMP is the one that PyTorch has loaded, by name: both have the same threads.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
_LONGEST_S = 60.0  # for a compiler that hangs


def compiler() -> str | None:
    """Return the path of the C compiler, or None if there is none."""
    return shutil.which(os.environ.get("CC", "cc"))


def c_library(source: Path, *defined: str) -> ctypes.CDLL | None:
    """Compile, or find, `source` with some macros (``NAME=VALUE``). None where that is not possible."""
    if (compiler_path := compiler()) is None:
        _log.warning("there is no C compiler for %s, so steps take longer", source.name)
        return None
    flags = (*_FLAGS, *(f"-D{macro}" for macro in defined))
    try:
        return _compiled(compiler_path, source, flags)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: nobody's home
        message = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else str(error)
        _log.warning(
            "%s is not compiled, so steps take longer: %s: %s", source.name, compiler_path, message.strip()
        )
        return None


def address(x: Tensor) -> int:
    """Return where a contiguous tensor's numbers begin."""
    assert x.is_contiguous()
    return x.data_ptr()


def _compiled(compiler_path: str, source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Compile with `compiler_path`, half a second, and cache the result for this kind of CPU."""
    # The source with all that it includes, and what the compiler defines by itself, which names its version
    # and all instructions that it may use here.
    about = subprocess.run(
        [compiler_path, *flags, "-dD", "-E", "-P", str(source)],
        check=True,
        capture_output=True,
        timeout=_LONGEST_S,
    ).stdout
    name = hashlib.sha256(about + " ".join(flags).encode()).hexdigest()[:32]
    folder = cache_folder()
    library = folder / f"{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            output = Path(scratch) / library.name
            subprocess.run(
                [compiler_path, *flags, str(source), "-o", str(output), "-lm"],
                check=True,
                capture_output=True,
                timeout=_LONGEST_S,
            )
            output.replace(library)  # whole or not at all, for other ranks
    return ctypes.CDLL(str(library))
