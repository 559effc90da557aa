"""Fuzzing: whatever a stranger's file or message holds is read or refused, in bounded time and memory.

In `make test` each test tries a few examples, the same ones each time. With MPILLM_FUZZ_SECONDS (`make fuzz`)
it goes on for so long, each time with others; what failed is tried first the next time, and the shortest that
failed is written to MPILLM_FUZZ_FOUND (build/fuzz) at once: to shrink it takes minutes, and may be cut.

With MPILLM_FUZZ_SEED, too, its rounds of 200 examples have that seed, the next one, and so on: whoever starts
there tries the same ones, and one that failed can be repeated alone (`make fuzz SEED=17 SECONDS=1`).
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st


class Search(NamedTuple):
    """How long each fuzzer searches, beyond a few examples, from which seed, and where failures are kept."""

    seconds: float = 0.0
    seed: int | None = None
    found: Path = Path()

    @classmethod
    def of_environment(cls) -> Search:
        seed = int(text) if (text := os.environ.get("MPILLM_FUZZ_SEED")) else None
        found = Path(os.environ.get("MPILLM_FUZZ_FOUND", "build/fuzz")).absolute()
        return cls(float(os.environ.get("MPILLM_FUZZ_SECONDS", "0")), seed, found)


SEARCH = Search.of_environment()
_ROUND = 200  # examples
_CPU_S = 10.0  # of one example; other work on the machine does not count
_LONG = 200_000  # bytes of a repeated piece, on which quadratic work takes minutes
_MEMORY = 256 << 20  # bytes that one example may take
_ADDRESSES = 2 << 30  # bytes beyond which an allocation fails, before the machine has no more
_MOST_MESSAGE = 20_000  # characters of a refusal


class _TooLong(BaseException):
    """Raised in the main thread, past whatever catches exceptions."""


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Fail if the block takes too much CPU time or memory."""

    def stop(_: int, __: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, stop)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)
    try:
        yield
    except _TooLong as error:
        raise AssertionError(f"it takes more than {_CPU_S:g} s of CPU time") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    assert taken < _MEMORY, f"it takes {taken} bytes of memory"


@contextlib.contextmanager
def _few_addresses() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ADDRESSES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


_shortest: dict[str, int] = {}


@contextlib.contextmanager
def _kept(folder: Path, name: str, drawn: tuple[Any, ...]) -> Iterator[None]:
    """Write what was drawn, with the error, where the block fails on it and nothing shorter has failed."""
    try:
        yield
    except BaseException:  # a panic of Rust is no Exception
        text = f"{drawn!r}\n\n{traceback.format_exc()}"
        if len(text) < _shortest.get(name, len(text) + 1):
            _shortest[name] = len(text)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.txt").write_text(text, errors="backslashreplace")
        raise


@contextlib.contextmanager
def _same_constants() -> Iterator[None]:
    """Let Hypothesis draw no constants of the modules that are loaded by then: a round alone loads fewer."""
    from hypothesis.internal.conjecture import providers
    from hypothesis.internal.constants_ast import Constants

    providers.CONSTANTS_CACHE.cache.clear()
    with mock.patch.object(providers, "_get_local_constants", Constants):
        yield


@contextlib.contextmanager
def _repeatable(number: int, name: str) -> Iterator[None]:
    """If the block, a round with this seed, fails, say how to repeat it."""
    try:
        yield
    except BaseException:  # a panic of Rust is no Exception
        print(f"\nround {number}; again: make fuzz SEED={number} SECONDS=1 PYTEST_ARGS='-k {name}'")
        raise


def fuzz(
    *strategies: st.SearchStrategy[Any],
    refused_by: type[Exception] | tuple[type[Exception], ...] = (),
    examples: int = 60,
    found: Sequence[tuple[Any, ...]] = (),
    search: Search = SEARCH,
) -> Callable[[Callable[..., None]], Callable[[Path], None]]:
    """Make a test of a function that reads what the strategies draw, its other arguments.

    The first is a folder of its own, the same one each time. It may raise `refused_by`, with a message of
    some length, and nothing else. `examples`: in `make test`.
    `found`: what was drawn when it failed, in a long search; tried each time.
    """

    def decorate(read: Callable[..., None]) -> Callable[[Path], None]:
        whole = 0  # examples that were not refused

        def one(tmp_path: Path, drawn: tuple[Any, ...]) -> None:
            kept = _kept(search.found, read.__name__, drawn) if search.seconds else contextlib.nullcontext()
            nonlocal whole
            with kept, _bounded():
                try:
                    read(tmp_path, *drawn)
                    whole += 1
                except refused_by as error:
                    assert 0 < len(str(error)) < _MOST_MESSAGE, "a refusal without a reason, or a long one"

        many = functools.partial(
            settings,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        )
        first = search.seed if search.seconds else None
        if first is not None:  # what failed before would come first, and the others differ
            limits = many(max_examples=_ROUND, derandomize=False, print_blob=True, database=None)
        elif search.seconds:
            limits = many(max_examples=_ROUND, derandomize=False, print_blob=True)
        else:
            limits = many(max_examples=examples, derandomize=True, database=None)
        run = limits(given(drawn=st.tuples(*strategies))(one))
        for drawn in found:
            run = example(drawn=drawn)(run)

        def test(tmp_path: Path) -> None:
            end, times = time.monotonic() + search.seconds, 0
            with _few_addresses(), contextlib.nullcontext() if first is None else _same_constants():
                while True:
                    if first is None:
                        run(tmp_path)
                    else:
                        with _repeatable(first + times, read.__name__):
                            seed(first + times)(run)(tmp_path)
                    times += 1
                    if time.monotonic() >= end:
                        break
            assert whole, "all examples were refused: the seeds are wrong themselves"
            if search.seconds:
                print(f"\n{read.__module__.rpartition('.')[2]} {read.__name__}: {_ROUND * times} examples")

        test.__doc__ = read.__doc__
        return test

    return decorate


# --- what is drawn ---

REPEATED = (
    *"\"\\'- 0,.:/=%#&@[{<(\n_a\t",
    '\\"',
    "a ",
    "a=",
    "a\n",
    "- ",
    "[]",
    "{}",
    '"",',
    "\r\n",
    "0,",
    "\\u",
)
LONG_TEXT = st.sampled_from([piece * (_LONG // len(piece)) for piece in REPEATED])
"""What takes long where time grows faster than the input."""
_CHARACTERS = st.text(max_size=12) | st.text(
    "\0\x1b[2J\r\n\"'\\<&>{}:,/.%\x85\u2028\U0001f600 aé0-", max_size=12
)
ODD_TEXT = st.one_of(
    _CHARACTERS,
    LONG_TEXT,
    st.just("\ud800"),  # half of a character
    st.sampled_from(
        ["", "NaN", "1e999", "-1", "null", "../../etc/passwd", "/", "<script>", "A" * 5000, "${x}", "%s"]
    ),
)
ODD_NUMBER: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 2**64, 10**30, 10**400]),
    st.integers(),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")]),
)
_LEAF: st.SearchStrategy[Any] = st.none() | st.booleans() | ODD_NUMBER | ODD_TEXT


def _nested(depth: int) -> Any:
    made: Any = []
    for _ in range(depth):
        made = [made]
    return made


ODD_VALUE: st.SearchStrategy[Any] = st.one_of(
    _LEAF,
    st.recursive(
        _LEAF,
        lambda one: st.lists(one, max_size=4) | st.dictionaries(ODD_TEXT, one, max_size=4),
        max_leaves=8,
    ),
    st.sampled_from([100, 600]).map(_nested),
)
"""What JSON can hold."""


@st.composite
def changed(draw: st.DrawFn, seeds: Sequence[Any], most: int = 4) -> Any:
    """Draw one of `seeds`, JSON, with some parts, at any depth, replaced, left out, renamed or doubled."""
    made = json.loads(json.dumps(draw(st.sampled_from(list(seeds)))))
    for _ in range(draw(st.integers(0, most))):
        made = _change(draw, made)
    return made


def _change(draw: st.DrawFn, value: Any) -> Any:
    inside = isinstance(value, (dict, list)) and value
    if not inside or draw(st.integers(0, 9)) == 0:
        return draw(ODD_VALUE)
    places = list(value) if isinstance(value, dict) else list(range(len(value)))
    at = draw(st.sampled_from(places))
    how = draw(st.integers(0, 9))
    if how == 0:
        del value[at]
    elif how == 1 and isinstance(value, dict):
        value[draw(ODD_TEXT)] = value.pop(at)
    elif how == 1:
        value.append(value[at])
    elif how == 2:
        other = draw(st.sampled_from(places))
        value[at], value[other] = value[other], value[at]
    else:
        value[at] = _change(draw, value[at])
    return value


_WORDS = [
    b"",
    b"\0",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\0" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\r\n",
    b"\n\n",
    b"[" * 3000,
    b'"',
    b"\x80",
]
_PIECE = (
    st.sampled_from(_WORDS)
    | st.binary(max_size=9)
    | LONG_TEXT.map(str.encode)
    | st.integers(0, 300).map(lambda n: n.to_bytes(8, "little"))
)


@st.composite
def damaged(draw: st.DrawFn, seeds: Sequence[bytes], words: Sequence[bytes] = (), most: int = 5) -> bytes:
    """Draw one of `seeds` with bytes replaced, left out, put in (also `words`), doubled or cut off."""
    made = bytearray(draw(st.sampled_from(list(seeds))))
    piece = _PIECE | st.sampled_from(list(words)) if words else _PIECE
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(made)))
        how = draw(st.integers(0, 6))
        if how <= 1:
            new = draw(piece)
            made[at : at + len(new)] = new
        elif how == 2:
            made[at:at] = draw(piece)
        elif how == 3:
            del made[at : at + draw(st.integers(1, 16))]
        elif how == 4:
            made[at:at] = made[at : at + draw(st.integers(1, 64))] * draw(st.integers(1, 3))
        elif how == 5 and at < len(made):
            made[at] ^= 1 << draw(st.integers(0, 7))
        else:
            del made[at:]
    return bytes(made)


def json_bytes(value: Any) -> bytes:
    """Write JSON; halves of characters stay escapes."""
    return json.dumps(value).encode()


def npy(values: Any) -> bytes:
    """Return an array as numpy's file."""
    made = io.BytesIO()
    np.save(made, np.array(values, np.int32))
    return made.getvalue()


NPY_WORDS = [b"'<i8'", b"(99999999999, 3)", b"True", b"'|O'", b"'<f4'", b"(-1, 3)"]


_folders: list[tempfile.TemporaryDirectory[str]] = []


def new_folder() -> Path:
    """Return a folder for examples that have no `tmp_path`. It is deleted when the process ends."""
    _folders.append(tempfile.TemporaryDirectory(prefix="mpillm-"))
    return Path(_folders[-1].name)
