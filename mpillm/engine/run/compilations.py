"""Count what this process compiles: Triton kernels and CUDA graphs.

A compilation takes seconds, so none may happen during a test.
"""

from __future__ import annotations

from typing import Any

# Characters of a name, which holds the arguments' types and whether they are multiples of 16
_MAX_NAME = 400

_compiled: list[str] = []
_watched: list[object] = []  # Triton's objects with our hook


def note(name: str) -> None:
    """Record that `name` has been compiled."""
    _compiled.append(name)


def count() -> int:
    """Return the number of compilations so far."""
    return len(_compiled)


def since(before: int) -> list[str]:
    """Return the names of what was compiled since `count` returned `before`."""
    return _compiled[before:]


def watch_triton() -> None:
    """Record each kernel that Triton compiles from now on for new types, alignments or constants.

    A kernel that Triton finds in its disk cache counts too: another machine would compile it.
    """
    place, name = _hook()
    if place in _watched:
        return
    _watched.append(place)
    other = getattr(place, name)

    def compiled(**event: Any) -> Any:
        note(f"{event['fn'].name} {event['key']}"[:_MAX_NAME])
        return other(**event) if other is not None else None

    setattr(place, name, compiled)


def _hook() -> tuple[Any, str]:
    """Return the object and the attribute that Triton calls after compiling a kernel."""
    import triton

    if hasattr(triton, "knobs"):
        return triton.knobs.runtime, "jit_post_compile_hook"
    return triton.runtime.jit.JITFunction, "compiled_hook"  # before 3.4
