"""A kind of load client: its files and arguments from the load, and its report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from launch.command import Command, KnownFailure
from launch.safe_text import one_line
from mpillm.files import excerpt, read_object
from mpillm.programs.kind import ProgramKind

_MAX_LINE = 16 << 20  # bytes: an event contains one response
_LINES_OF_A_REQUEST, _MORE_LINES = 16, 100_000


class PromptSample(NamedTuple):
    """Prompt with the limits of its response."""

    tokens: list[int]  # empty if only a text is known
    text: str  # "" if only tokens are known
    max_tokens: int  # of the response
    ignores_stop: bool  # the response has exactly `max_tokens`


class Seeds(NamedTuple):
    """LoadGen's seeds, for the client's."""

    samples: int
    arrivals: int
    answers: int


@dataclass(frozen=True)
class LoadSpec:
    """Load of a run, for a load client."""

    urls: tuple[str, ...]  # of the servers, without /v1
    model: str  # name in requests
    tokenizer: str  # its folder; "" if there is none
    folder: Path  # for the client's files, unique to the run
    samples: Sequence[PromptSample]  # each created on access
    lengths: Sequence[int]  # by sample: maximum tokens of the response
    ignoring: Sequence[bool]  # by sample: whether the response has exactly this length
    order: Sequence[int]  # the sample of each request, in LoadGen's order of issue
    rate: float | None  # requests per second, at random times (a Poisson process)
    concurrency: int | None  # open requests; without this and a rate, all requests are open simultaneously
    temperature: float
    top_k: int
    top_p: float
    min_tokens: int  # of a response
    seeds: Seeds
    count_tokens: Callable[[str], int] = len  # of a text, for clients that do not count tokens
    args: tuple[str, ...] = ()  # the user's
    min_duration_ms: int = 0  # for which `order` was made
    sends_text: bool = False  # only the texts of the samples are known
    gives_usage: bool = True  # the server's streams have token counts
    all_chunks: bool = False  # record the time of each piece of a stream, not only of the first and the last

    @property
    def max_open(self) -> int:
        """Maximum number of open requests, without a rate."""
        return self.concurrency or len(self.order)

    def one_length(self) -> int:
        """Return the maximum length of all responses. Raises ValueError if samples differ."""
        lengths = {*self.lengths}
        if len(lengths) > 1:
            raise ValueError(
                f"takes one longest answer; those of the samples are {min(lengths)} to {max(lengths)} tokens"
            )
        return lengths.pop()

    def ignores_stop(self) -> bool:
        """Return whether every response has its maximum length. Raises ValueError if samples differ."""
        values = {*self.ignoring}
        if len(values) > 1:
            raise ValueError("can't ignore the end of some answers only, as the data set asks")
        return values.pop()


class RequestRecord(NamedTuple):
    """Outcome of a request, in seconds of any clock."""

    issued: float
    first: float  # NaN without streaming
    ended: float
    sample: int
    tokens: int  # of the response
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds until the first token; NaN without streaming."""
        return self.first - self.issued

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; NaN without one."""
        return (self.ended - self.first) / (self.tokens - 1) if self.tokens > 1 else math.nan

    @property
    def latency(self) -> float:
        """Seconds until the end of the response."""
        return self.ended - self.issued


LATENCIES = ("ttft_ms", "tpot_ms", "latency_ms")
_MAX_TOKENS = 2**31  # of a response
_MAX_ERROR = 200  # characters of Python's error about a report
_MAX_FIGURE, _MIN_S = 1e18, 1e-9  # no test has figures beyond these


@dataclass(frozen=True)
class LoadReport:
    """Report of a load client."""

    version: str
    completed: int
    failed: int
    duration_s: float
    tokens: float | None = None  # of all responses, by the client's count
    # Statistics of each reported latency in milliseconds: mean, p50, p90, p99.
    latencies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # the client's doubts about its figures
    requests: Sequence[RequestRecord] = ()  # empty if the client reports only sums
    self_counted: int = 0  # answers whose tokens the client counts itself, without the server's counts

    @property
    def answer_tokens(self) -> float:
        """Tokens of all answers."""
        return sum(one.tokens for one in self.requests if not one.error) or self.tokens or 0

    def max_answer_tokens(self, lengths: Sequence[int]) -> int:
        """Return how many tokens the answers may have together. `lengths`: of the answer to each sample."""
        good = [one for one in self.requests if not one.error]
        return sum(lengths[one.sample] for one in good) if good else self.completed * max(lengths)

    def to_json(self) -> dict[str, Any]:
        """Return the main figures for result.json, without percentiles, which mpillm computes itself."""
        lasted = self.duration_s
        return {
            "version": one_line(self.version),
            "completed": self.completed,
            "failed": self.failed,
            "self_counted": self.self_counted,
            "duration_s": round(lasted, 4),
            "requests_per_second": round(self.completed / lasted, 4) if lasted > 0 else 0.0,
            "tokens_per_second": round(self.tokens / lasted, 4) if self.tokens and lasted > 0 else None,
            **{
                name: {"mean": mean}
                for name in LATENCIES
                if (mean := self.latencies.get(name, {}).get("mean"))
            },
        }


def checked(report: LoadReport, n_samples: int) -> LoadReport:
    """Check a client's report. Raises ValueError, TypeError or OverflowError for impossible values."""
    figures = [report.completed, report.failed, report.duration_s, report.tokens or 0]
    for name, latency in report.latencies.items():
        if not isinstance(latency, Mapping):
            raise TypeError(f"{name} is {excerpt(latency)}")
        figures += latency.values()
    for figure in figures:
        if not 0 <= figure < _MAX_FIGURE:
            raise ValueError(f"{figure} where a count or a time belongs")
    if 0 < report.duration_s < _MIN_S:
        raise ValueError(f"it lasted {report.duration_s} s")
    for one in report.requests:
        if not (
            abs(one.issued) < _MAX_FIGURE
            and abs(one.ended) < _MAX_FIGURE
            and not abs(one.first) >= _MAX_FIGURE
        ):
            raise ValueError(f"a request from {one.issued} to {one.ended}, first token at {one.first}")
        if not (0 <= index(one.sample) < n_samples and 0 <= index(one.tokens) < _MAX_TOKENS):
            raise ValueError(f"a request of sample {one.sample} with {one.tokens} tokens")
    return report


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
    """Kind of load client."""

    read: Callable[
        [LoadSpec], LoadReport
    ]  # reads the report. Raises ValueError, KeyError, ConfigError, OSError
    write: Callable[[LoadSpec], None] = lambda load: None  # writes the client's input files
    # Reads the texts of responses by sample, from a folder and the number of requests. Raises ConfigError.
    # None: the client stores no texts.
    answers: Callable[[Path, int], dict[int, str]] | None = None
    many_urls: bool = False  # it distributes requests over several servers
    needs_tokenizer: bool = False
    needs_usage: bool = False  # it counts tokens itself if the server's streams have no usage
    # Maximum number of requests that it sends beside those of its report; None: unknown.
    more_requests: Callable[[LoadSpec], int | None] = lambda load: None

    common_failures = COMMON_FAILURES

    @property
    def title(self) -> str:
        """The name of a client of this kind in messages."""
        return f"harness ({self.short_name})"

    def command(self, spec: LoadSpec) -> Command:
        if self.needs_tokenizer and not spec.tokenizer:
            raise ValueError("counts tokens with a tokenizer: name a folder that has one with --model_path")
        return super().command(spec)

    def max_server_tokens(self, load: LoadSpec, report: LoadReport) -> float | None:
        """Return how many tokens servers can have generated for this client; None: unknown."""
        more = self.more_requests(load)
        if more is None or report.self_counted or not report.answer_tokens:
            return None
        more += max(0, len(load.order) - report.completed)  # requests without a complete answer
        return report.answer_tokens + more * max(load.lengths)

    def report(self, load: LoadSpec) -> LoadReport:
        """Return the client's report. Raises ConfigError if it cannot be read."""
        try:
            report = checked(self.read(load), len(load.samples))
            return replace(report, problems=(*report.problems, *_excess(report, load.lengths)))
        except ConfigError as error:
            raise ConfigError(f"its report can't be read: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            text = error if isinstance(error, OSError) else repr(error)[:_MAX_ERROR]
            raise ConfigError(f"its report can't be read: {text}") from error


def _excess(report: LoadReport, lengths: Sequence[int]) -> Iterator[str]:
    """Yield that a client counts more tokens than its requests allow."""
    n, limit = report.answer_tokens, report.max_answer_tokens(lengths)
    if n > limit:
        yield f"it counts {n:,.0f} tokens in {report.completed:,} answers of at most {limit:,} together"


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def read_lines(path: Path, n_requests: int, n_chunks: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the objects of a client's JSONL file about its requests.

    `n_chunks`: maximum number of pieces of a stream, if the file has a line for each of them.

    Raises OSError; ConfigError for a damaged file, a line of more than 16 MiB, or more lines than clients
    write for this number of requests.
    """
    max_lines = _MORE_LINES + (_LINES_OF_A_REQUEST + n_chunks) * n_requests
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, _MAX_LINE + 1), b""), 1):
            if number > max_lines:
                raise ConfigError(f"{path}: more than {max_lines:,} lines, for {n_requests:,} requests")
            if len(line) > _MAX_LINE:
                raise ConfigError(f"{path}:{number}: a line of more than {_MAX_LINE:,} bytes")
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
    """Return a client's report. Raises ConfigError if it is missing or damaged."""
    if not path.exists():
        raise ConfigError(f"it has left no report ({path.name})")
    return read_object(path)


def body(load: LoadSpec, sample: PromptSample) -> dict[str, Any]:
    """Return the body of a sample's request, for clients with complete bodies.

    The prompt consists of tokens, or is a text if the tokens are unknown.
    """
    prompt = sample.tokens or sample.text
    fields: dict[str, Any] = {"model": load.model, "prompt": prompt, "max_tokens": sample.max_tokens}
    fields |= sampling(load) | {"stream": True, "stream_options": {"include_usage": True}}
    if load.min_tokens:
        fields["min_tokens"] = min(load.min_tokens, sample.max_tokens)
    if sample.ignores_stop:
        fields["ignore_eos"] = True
    return fields


def sampling(load: LoadSpec) -> dict[str, Any]:
    """Return the sampling parameters, by vLLM's names."""
    chosen: dict[str, Any] = {"temperature": load.temperature, "seed": load.seeds.answers}
    if load.top_k:
        chosen["top_k"] = load.top_k
    if load.top_p < 1:
        chosen["top_p"] = load.top_p
    return chosen


def seed32(seed: int) -> int:
    """Return LoadGen's seed, reduced for programs with signed 32-bit seeds."""
    return seed & 0x7FFFFFFF


def milliseconds(statistics: Mapping[str, Any], factor: float, **names: str) -> dict[str, float]:
    """Return the available statistics of a latency times `factor`. `names`: the client's, by our name."""
    return {
        name: round(factor * value, 4)
        for name, other in names.items()
        if isinstance(value := statistics.get(other), (int, float)) and math.isfinite(value)
    }
