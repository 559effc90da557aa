"""A kind of load client: its files and arguments from the load, and its report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from launch.command import Command, KnownFailure
from launch.safe_text import one_line
from mpillm.files import excerpt, read_object
from mpillm.programs.kind import ProgramKind

_MOST_LINE = 16 << 20  # bytes: an event holds one answer
_LINES_OF_A_REQUEST, _MORE_LINES = 16, 100_000


class PromptSample(NamedTuple):
    """A prompt, and what may follow it."""

    tokens: list[int]  # none where only a text is known
    text: str  # "" where only tokens are known
    longest: int  # tokens of the answer
    ignores_stop: bool  # it has no fewer


class Seeds(NamedTuple):
    """LoadGen's, for a client's own."""

    samples: int
    arrivals: int
    answers: int


@dataclass(frozen=True)
class LoadSpec:
    """The load of a run, for a client that makes it."""

    urls: tuple[str, ...]  # of the servers, without /v1
    model: str  # as they call it
    tokenizer: str  # its folder; "": there is none
    folder: Path  # for its files, which no other run uses
    samples: Sequence[PromptSample]  # each made when it is asked for
    lengths: Sequence[int]  # of the samples: tokens of the longest answer
    ignoring: Sequence[bool]  # of the samples: the answer has no fewer
    order: Sequence[int]  # the requests: of each the sample, as LoadGen would issue them
    rate: float | None  # requests per second, at random times (a Poisson process)
    concurrency: int | None  # requests at once; neither this nor a rate: all at once
    temperature: float
    top_k: int
    top_p: float
    shortest: int  # tokens of an answer
    seeds: Seeds
    count_tokens: Callable[[str], int] = len  # of a text, for clients that keep no numbers
    args: tuple[str, ...] = ()  # as the user types them
    min_duration_ms: int = 0  # that `order` was made for
    sends_text: bool = False  # only the texts of the samples are known
    all_chunks: bool = False  # each piece of a stream is timed, not only the first and the last

    @property
    def at_once(self) -> int:
        """Requests that may be open together, if no rate says when they are sent."""
        return self.concurrency or len(self.order)

    def one_length(self) -> int:
        """Return the longest answer, if it is that of all samples. Raises ValueError."""
        lengths = {*self.lengths}
        if len(lengths) > 1:
            raise ValueError(
                f"takes one longest answer; those of the samples are {min(lengths)} to {max(lengths)} tokens"
            )
        return lengths.pop()

    def ignores_stop(self) -> bool:
        """Return whether every answer is to have its full length. Raises ValueError if some are."""
        found = {*self.ignoring}
        if len(found) > 1:
            raise ValueError("can't ignore the end of some answers only, as the data set asks")
        return found.pop()


class RequestRecord(NamedTuple):
    """What became of a request: seconds of any clock."""

    issued: float
    first: float  # NaN: it did not stream
    ended: float
    sample: int
    tokens: int  # of the answer
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds until the first token; NaN: it did not stream."""
        return self.first - self.issued

    @property
    def tpot(self) -> float:
        """Seconds of each token after the first; NaN: there is none."""
        return (self.ended - self.first) / (self.tokens - 1) if self.tokens > 1 else math.nan

    @property
    def latency(self) -> float:
        """Seconds until the end of the answer."""
        return self.ended - self.issued


LATENCIES = ("ttft_ms", "tpot_ms", "latency_ms")
_MOST_TOKENS = 2**31  # of an answer
_MOST_SAID = 200  # characters of what Python says of a report
_MOST, _LEAST_S = 1e18, 1e-9  # figures beyond these come of no test


@dataclass(frozen=True)
class LoadReport:
    """What a client reports."""

    version: str
    completed: int
    failed: int
    duration_s: float
    tokens: float | None = None  # of all answers, as it counts them
    # Of each latency that it tells, milliseconds by name: mean, p50, p90, p99.
    latencies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # what it says against its own figures
    requests: Sequence[RequestRecord] = ()  # each of them; none: it tells only sums

    def to_json(self) -> dict[str, Any]:
        """Return its main figures, for result.json, without percentiles: those have one definition."""
        lasted = self.duration_s
        return {
            "version": one_line(self.version),
            "completed": self.completed,
            "failed": self.failed,
            "duration_s": round(lasted, 4),
            "requests_per_second": round(self.completed / lasted, 4) if lasted > 0 else 0.0,
            "tokens_per_second": round(self.tokens / lasted, 4) if self.tokens and lasted > 0 else None,
            **{
                name: {"mean": mean}
                for name in LATENCIES
                if (mean := self.latencies.get(name, {}).get("mean"))
            },
        }


def checked(found: LoadReport, n_samples: int) -> LoadReport:
    """Return what a client reports. Raises ValueError, TypeError or OverflowError for what no test gives."""
    figures = [found.completed, found.failed, found.duration_s, found.tokens or 0]
    for name, latency in found.latencies.items():
        if not isinstance(latency, Mapping):
            raise TypeError(f"{name} is {excerpt(latency)}")
        figures += latency.values()
    for figure in figures:
        if not 0 <= figure < _MOST:
            raise ValueError(f"{figure} where a count or a time belongs")
    if 0 < found.duration_s < _LEAST_S:
        raise ValueError(f"it lasted {found.duration_s} s")
    for one in found.requests:
        if not (abs(one.issued) < _MOST and abs(one.ended) < _MOST and not abs(one.first) >= _MOST):
            raise ValueError(f"a request from {one.issued} to {one.ended}, first token at {one.first}")
        if not (0 <= index(one.sample) < n_samples and 0 <= index(one.tokens) < _MOST_TOKENS):
            raise ValueError(f"a request of sample {one.sample} with {one.tokens} tokens")
    return found


COMMON_FAILURES = (
    KnownFailure(
        r"unrecognized arguments|[Nn]o such option|error: argument|invalid choice|Unknown option",
        "it does not know one of its options",
        "look at --harness_args, and at its version",
    ),
    KnownFailure(
        r"Connection refused|ConnectionRefusedError|Cannot connect to host|All connection attempts failed",
        "nothing listens where it sends its requests",
        "look at the servers' logs",
    ),
    KnownFailure(
        r"Too many open files|Errno 24", "it may open too few files", "raise the limit: ulimit -n 65536"
    ),
)


@dataclass(frozen=True, kw_only=True)
class LoadClientKind(ProgramKind[LoadSpec]):
    """A kind of load client."""

    read: Callable[[LoadSpec], LoadReport]  # its report. Raises ValueError, KeyError, ConfigError, OSError
    write: Callable[[LoadSpec], None] = lambda load: None  # the files that it reads
    # The texts of its answers by sample, from its files in a folder, of so many requests. Raises ConfigError.
    # None: it keeps none.
    answers: Callable[[Path, int], dict[int, str]] | None = None
    many_urls: bool = False  # it spreads its requests over several servers
    needs_tokenizer: bool = False

    common_failures = COMMON_FAILURES

    @property
    def title(self) -> str:
        """The name of a client of this kind in messages."""
        return f"harness ({self.short_name})"

    def command(self, spec: LoadSpec) -> Command:
        if self.needs_tokenizer and not spec.tokenizer:
            raise ValueError("counts tokens with a tokenizer: name a folder that has one with --model_path")
        return super().command(spec)

    def report(self, load: LoadSpec) -> LoadReport:
        """Return what it reports. Raises ConfigError: why that can't be read."""
        try:
            return checked(self.read(load), len(load.samples))
        except ConfigError as error:
            raise ConfigError(f"its report can't be read: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            what = error if isinstance(error, OSError) else repr(error)[:_MOST_SAID]
            raise ConfigError(f"its report can't be read: {what}") from error


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def read_lines(path: Path, n_requests: int) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file that a client has left of its requests.

    Raises OSError; ConfigError for what is damaged, a line of more than 16 MiB, or more lines than clients
    leave of so many requests.
    """
    most = _MORE_LINES + _LINES_OF_A_REQUEST * n_requests
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, _MOST_LINE + 1), b""), 1):
            if number > most:
                raise ConfigError(f"{path}: more than {most:,} lines, for {n_requests:,} requests")
            if len(line) > _MOST_LINE:
                raise ConfigError(f"{path}:{number}: a line of more than {_MOST_LINE:,} bytes")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: not a JSON object")
            yield row


def report_of(path: Path) -> dict[str, Any]:
    """Return the report that a client has left. Raises ConfigError if there is none, or it is damaged."""
    if not path.exists():
        raise ConfigError(f"it has left no report ({path.name})")
    return read_object(path)


def body(load: LoadSpec, sample: PromptSample) -> dict[str, Any]:
    """Return the body of a sample's request, for clients that take whole bodies.

    Its prompt is tokens, or a text if only that is known.
    """
    prompt = sample.tokens or sample.text
    asked: dict[str, Any] = {"model": load.model, "prompt": prompt, "max_tokens": sample.longest}
    asked |= sampling(load) | {"stream": True, "stream_options": {"include_usage": True}}
    if load.shortest:
        asked["min_tokens"] = min(load.shortest, sample.longest)
    if sample.ignores_stop:
        asked["ignore_eos"] = True
    return asked


def sampling(load: LoadSpec) -> dict[str, Any]:
    """Return how answers are chosen, by vLLM's names."""
    chosen: dict[str, Any] = {"temperature": load.temperature, "seed": load.seeds.answers}
    if load.top_k:
        chosen["top_k"] = load.top_k
    if load.top_p < 1:
        chosen["top_p"] = load.top_p
    return chosen


def seed32(seed: int) -> int:
    """Return what of a seed of LoadGen's a program takes that reads it as a signed number of 32 bits."""
    return seed & 0x7FFFFFFF


def milliseconds(found: Mapping[str, Any], factor: float, **names: str) -> dict[str, float]:
    """Return a latency's statistics: by our name, theirs times `factor`; without those that lack."""
    return {
        name: round(factor * value, 4)
        for name, theirs in names.items()
        if isinstance(value := found.get(theirs), (int, float)) and math.isfinite(value)
    }
