"""Content of messages: type, writer and reader for each tag of the control and route communicators.

Cores also take and return batches of requests and responses. A batch is one structured array with a row per
request or response, and one int32 array of all their tokens, concatenated in row order. On the wire, it is
one uint8 buffer: the numbers of rows and of tokens (int64), the rows, the tokens. A reader makes views of the
buffer, not copies.
"""

from __future__ import annotations

import enum
import itertools
import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.tags import Tag
from mpillm.errors import Failure

if TYPE_CHECKING:  # data sets use this module and must not start MPI
    from disagg import WorldPlan
    from mpillm.comms.rank_connections import Address
    from mpillm.comms.transport import Buffer, Transport
    from mpillm.devices import Gpu, OwnGpu
    from mpillm.phases import Phase
    from mpillm.telemetry.cpu_use import CpuUse
    from mpillm.telemetry.gpu_meter import GpuUse

WAITING = "waiting for "
"""Beginning of `Beat.doing` if a rank waits for a program outside the run."""

NO_INSTANCE = 0xFFFFFFFF  # the instance that computes the context also generates

REQUEST = np.dtype(
    [
        ("id", "<u4"),  # wire id: small, reused after the request's last row
        ("n_tokens", "<u4"),  # prompt tokens
        ("max_output", "<u4"),  # maximum number of generated tokens, including the end token
        ("min_output", "<u4"),  # minimum number of tokens before an end or stop token ends the response
        ("temperature", "<f4"),  # 0 is greedy
        ("top_k", "<u4"),  # 0 is off
        ("top_p", "<f4"),  # 1 is off
        ("seed", "<u4"),
        ("flags", "<u4"),  # RequestFlags
        ("generation", "<u4"),  # the instance that receives the KV cache, or NO_INSTANCE
        ("logprobs", "<u4"),  # 0: off. 1 + k: log probability of each token, and the k likeliest tokens
        ("session", "<u4"),  # the conversation, or 0: the leader's policy `conversation` uses it
        ("salt", "<u8"),  # requests with different salts share no cached blocks; 0: none
    ]
)

RESPONSE = np.dtype(
    [
        ("id", "<u4"),
        # FIRST: 1. FINAL: all tokens, including the first and the end token. TIMES: 2 numbers.
        # CONTEXT_DONE: 1 number if the request has TIMES, otherwise 0. LOGPROBS: see the flag.
        ("n_tokens", "<u4"),
        ("flags", "<u4"),  # a ResponseFlag
    ]
)

PROMPT_COUNTS = np.dtype([("prompt", "<i4"), ("cached", "<i4")])
"""Tokens of a prompt, and how many of them were in a KV cache; -1: unknown."""


class RequestFlag(enum.IntFlag):
    """Options of a request."""

    IGNORE_STOP = 1  # no stop word ends the response
    IGNORE_END = 2  # the end token does not end the response
    STREAM = 4  # send tokens as they are generated
    TIMES = 8  # send TIMES responses
    MESSAGE = 16  # to a chat endpoint: send a MESSAGE response
    PROMPT_COUNTS = 32  # send a PROMPT_COUNTS response
    MAY_BE_REFUSED = 64  # a server that refuses the request's content (status 400, 413 or 422) fails only it
    CONTEXT_ONLY = 256  # another run generates, and fetches the KV cache (`serve --server_role`)
    GENERATION_ONLY = 512  # another run has computed the context; the KV cache has been fetched


class ResponseFlag(enum.IntFlag):
    """Kind of a response row.

    From a context instance, FIRST with FINAL means that there is no handoff. FINAL alone means that
    CONTEXT_DONE follows.
    """

    FIRST = 1  # the first token; it is the row's only token, unless FINAL is also set
    FINAL = 2  # the response is complete
    # The KV cache has been transferred; the context instance holds nothing of the request. With TIMES, the
    # number is the duration of the transfer in µs.
    CONTEXT_DONE = 4
    ERROR = 8  # the request has failed (set with FINAL, no tokens)
    CANCELLED = 16  # the request was cancelled (set with FINAL, no tokens)
    PARTIAL = 32  # with STREAM: the next tokens; FINAL contains all tokens again
    CANCEL_DONE = 64  # no CANCEL or DROP of this id is in transit (set alone, or with FINAL or LOST)
    # If the request has the flag TIMES, immediately before FIRST. In place of tokens: µs since the request
    # arrived at the instance, µs since its first step began.
    TIMES = 128
    # If the request has `logprobs` 1 + k, immediately before FIRST, PARTIAL or FINAL. In place of tokens: the
    # position of the first of these tokens in the response. Then 1 + 2k numbers for each token: its log
    # probability, the k likeliest tokens in order, and their log probabilities, as the bits of float32.
    LOGPROBS = 256
    # To the harness: an instance of the request is lost, and no more messages follow. Resend the request,
    # unless CANCEL_DONE is also set. 1 number: the lost instance. To the leader: the sending instance holds
    # nothing of the request, because the request's other instance is lost (see roles/retries.py).
    LOST = 512
    # From a client of a server, immediately before FINAL with ERROR. In place of tokens: a `Refusal`.
    REFUSED = 1024
    # If the request has MESSAGE, immediately before FINAL. In place of tokens: the bytes of the response's
    # JSON as a message of a chat.
    MESSAGE = 2048
    # If the request has PROMPT_COUNTS, immediately before FIRST, or before FINAL from a generation instance
    # (a context instance's FIRST may come later) and from a client of a server that reports them at the end.
    # In place of tokens: tokens of the prompt, and how many of them were in the KV cache, or -1.
    PROMPT_COUNTS = 4096


NO_TOKENS = (
    ResponseFlag.TIMES
    | ResponseFlag.LOGPROBS
    | ResponseFlag.REFUSED
    | ResponseFlag.MESSAGE
    | ResponseFlag.PROMPT_COUNTS
)
"""Rows with one of these flags have other numbers in place of tokens."""


class Refusal(NamedTuple):
    """HTTP error of a server that a core uses as a client."""

    status: int
    message: str
    retry_after_s: int = 0  # 0: unspecified
    is_too_long: bool = False  # the prompt and its response exceed the model's context

    def numbers(self) -> list[int]:
        """Return the numbers of a row with REFUSED."""
        text = self.message.encode(errors="backslashreplace")
        return [self.status, self.retry_after_s, int(self.is_too_long), *text]

    @staticmethod
    def of(numbers: Sequence[int]) -> Refusal:
        """Return the refusal from the result of `numbers()`."""
        status, retry_after_s, is_too_long, *text = numbers
        return Refusal(status, bytes(text).decode(), retry_after_s, bool(is_too_long))


_HEADER = struct.Struct("<qq")  # rows, tokens


@dataclass(slots=True)
class Batch:
    """Rows (REQUEST or RESPONSE, shape [n]) and their tokens (int32, shape [rows["n_tokens"].sum()])."""

    rows: NDArray[np.void]
    tokens: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.rows)

    def offsets(self) -> NDArray[np.int64]:
        """Return offsets, shape [n + 1]: row i's tokens are ``tokens[offsets[i]:offsets[i + 1]]``."""
        offsets = np.zeros(len(self.rows) + 1, np.int64)
        np.cumsum(self.rows["n_tokens"], out=offsets[1:])
        return offsets

    def split(self) -> list[Batch]:
        """Return one batch per row. The batches are views."""
        offsets = self.offsets()
        return [
            Batch(self.rows[i : i + 1], self.tokens[offsets[i] : offsets[i + 1]]) for i in range(len(self))
        ]

    def select(self, keep: NDArray[np.bool_]) -> Batch:
        """Return copies of the rows where `keep` (shape [n]) is true, with their tokens."""
        return Batch(self.rows[keep], self.tokens[np.repeat(keep, self.rows["n_tokens"])])

    def pack(self) -> Buffer:
        """Return the batch as one buffer for the wire."""
        header = _HEADER.pack(len(self.rows), len(self.tokens))
        # The tokens of a large batch are copied once: each further copy would need new memory pages.
        return np.frombuffer(b"".join((header, self.rows.tobytes(), self.tokens.data)), np.uint8)

    @staticmethod
    def unpack(buffer: Buffer, dtype: np.dtype[np.void]) -> Batch:
        """Return the batch in `buffer`, with rows of `dtype`, as views of the buffer.

        Raises ValueError if the buffer's size does not match its header.
        """
        count, n_tokens = _HEADER.unpack_from(buffer.data)
        row_end = _HEADER.size + count * dtype.itemsize
        if row_end + 4 * n_tokens != len(buffer) or count < 0 or n_tokens < 0:
            raise ValueError(
                f"a message of {len(buffer)} bytes claims to hold {count} rows and {n_tokens} tokens"
            )
        return Batch(buffer[_HEADER.size : row_end].view(dtype), buffer[row_end:].view(np.int32))


def index_of(ids: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]] | slice:
    """Return an index of an array's positions `ids`. For one position, a slice is ten times as fast."""
    if len(ids) != 1:
        return ids
    only = int(ids[0])
    return slice(only, only + 1)


def total(values: NDArray[np.integer[Any]]) -> int:
    """Return the sum. Reading a single value is 20 times as fast as NumPy's sum of it."""
    return int(values[0]) if len(values) == 1 else int(values.sum())


def concat(batches: list[Batch]) -> Batch:
    """Return one batch of all rows and tokens, in order. `batches`: at least one, all of one dtype."""
    if len(batches) == 1:
        return batches[0]
    return Batch(np.concatenate([b.rows for b in batches]), np.concatenate([b.tokens for b in batches]))


def ragged_take(
    tokens: NDArray[np.int32], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return ``concatenate([tokens[s : s + n] for s, n in zip(starts, lengths)])``, but faster.

    The result for a single piece is a view.
    """
    if len(starts) == 1:
        return tokens[starts[0] : starts[0] + lengths[0]]
    n = int(lengths[0]) if len(lengths) else 0
    if n and (lengths == n).all():  # rows of a sliding window over all tokens: 7 times as fast as below
        windows = np.ndarray((len(tokens) - n + 1, n), tokens.dtype, tokens, strides=tokens.strides * 2)
        return windows[starts].reshape(-1)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    positions = np.arange(total, dtype=np.int64)
    positions += np.repeat(starts - (ends - lengths), lengths)
    return tokens[positions]


def by_value(values: NDArray[np.int64], batch: Batch) -> list[tuple[int, Batch]]:
    """Split `batch` by a value of each row (shape [n]). Rows with equal values keep their order."""
    if len(values) == 1 or (values == values[0]).all():
        return [(int(values[0]), batch)]
    order = np.argsort(values, kind="stable")
    rows, offsets = batch.rows[order], batch.offsets()
    tokens = ragged_take(batch.tokens, offsets[:-1][order], rows["n_tokens"].astype(np.int64))
    ends = np.cumsum(rows["n_tokens"], dtype=np.int64)
    cuts = [0, *(np.flatnonzero(np.diff(values[order])) + 1).tolist(), len(rows)]
    at = [0, *ends.tolist()]
    return [
        (int(values[order[a]]), Batch(rows[a:b], tokens[at[a] : at[b]])) for a, b in itertools.pairwise(cuts)
    ]


# --- content of each tag ---


class Beat(NamedTuple):
    """Heartbeat of a rank."""

    phase: Phase
    away_s: float  # since the main thread was last in its event loop
    stack: str  # of the main thread, if `away_s` is long
    measured: Any = None  # `Role.measured`, of a root rank
    doing: str = ""  # `Role.doing`


class Arrival(NamedTuple):
    """Report that the sender has done its part of a phase."""

    phase: Phase
    report: Any  # of join: JoinReport; load: URLs of own servers; drain: DrainReport; otherwise None


class JoinReport(NamedTuple):
    """Facts about a rank that it reports when it joins."""

    host: str
    pid: int
    started: float  # time.time() at the start of the process
    versions: dict[str, str]
    usage_error: str = ""  # error in its command line
    digest: str = ""  # of its configuration
    # Options by name, to describe the difference of two digests.
    values: dict[str, Any] = {}  # noqa: RUF012 - never changed
    gpus: tuple[Gpu, ...] = ()  # GPUs that the rank may use, if its core uses GPUs
    pids: str = ""  # see `siblings.visible_pids`
    code: str = ""  # a digest of mpillm's files, from each node's first rank; "" from other ranks
    port: int = 0  # reserved for the connections of a server over several nodes; 0: none


class DrainReport(NamedTuple):
    """Report of a rank on the test."""

    roles: list[dict[str, Any]]  # `Role.report`
    cpu: CpuUse
    gpu: GpuUse | None  # None: without a GPU, or without the driver's measurements
    messages: int  # sent in the route communicator
    message_bytes: int
    machine: dict[str, Any] | None  # from the first rank of its node
    telemetry: dict[str, Any]  # this rank's part of `TELEMETRY` in the run directory


class Release(NamedTuple):
    """Report that all ranks have done their part of a phase."""

    phase: Phase
    value: Any  # equal for all. After join: Setup; load: servers' URLs; stop: exit code; otherwise None


class Rank0At(NamedTuple):
    """Location of rank 0's process."""

    host: str
    pid: int
    pids: str  # see `siblings.visible_pids`
    address: Address | None  # None: all ranks can see rank 0's process
    reporter: int = 1  # the rank that reports a silent rank 0 and, if it can see rank 0's process, kills it


class Setup(NamedTuple):
    """Values that every rank receives when all have joined."""

    plan: WorldPlan
    log_dir: str
    rank0: Rank0At
    gpus: dict[int, OwnGpu]  # see `devices.assign`
    token: str  # unique to this run
    outlives_losses: bool  # --on_instance_loss continue
    server_gpus: dict[int, tuple[int, ...]]  # by owner; see `own_servers.gpus_of_servers`
    server_ports: dict[int, int]  # by rank; see `JoinReport.port`
    server_secret: str  # of the servers that this run's ranks own
    sends_text: bool  # prompts are texts, as bytes: see `ClientConfig`
    # Process ids by rank, for each host or container where they are valid (see `siblings.visible_pids`).
    pids: dict[str, dict[int, int]] = {}  # noqa: RUF012 - never changed


class Stop(NamedTuple):
    """Request to end now."""

    code: int  # exit code
    finalize: bool  # no rank is lost, so call MPI_Finalize


class InstanceLoss(NamedTuple):
    """Loss of an instance. The other ranks send it no messages, and drop its messages."""

    instance: int
    ranks: tuple[int, ...]  # its ranks in the world


class Event(NamedTuple):
    """A line that rank 0 prints on the console during the test."""

    kind: str  # one word
    text: str


class StoppedRank(NamedTuple):
    """A rank whose process is stopped (SIGSTOP)."""

    rank: int
    how: str  # and how to continue it: see `siblings.how_it_is_stopped`


class Grant(NamedTuple):
    """Credits that an instance grants: requests and KV tokens that it can additionally hold."""

    requests: int
    tokens: int  # of KV cache


NO_SLOT = NO_TOKEN = -1
NumberRows = Sequence[Sequence[int]]  # plain lists: named tuples take three times as long to make


T = TypeVar("T")


class Message(Generic[T]):
    """A type of message: its tag, and the functions that write and read its value."""

    def __init__(self, tag: Tag, write: Callable[[T], Buffer], read: Callable[[Buffer], T]) -> None:
        self.tag = tag
        self.write = write
        self.read = read

    def send(self, transport: Transport, dest: int, value: T) -> None:
        """Send `value`; arrays in it are copied."""
        transport.send(dest, self.tag, self.write(value))

    def send_all(self, transport: Transport, dests: Iterable[int], value: T) -> None:
        """Send `value` to several ranks, written once."""
        buffer = self.write(value)
        for dest in dests:
            transport.send(dest, self.tag, buffer)

    def handle(self, transport: Transport, handler: Callable[[int, T], None]) -> None:
        """Call `handler(source, value)` for each message with this tag. Arrays in `value` are views."""
        read = self.read
        transport.handlers[self.tag] = lambda received: handler(received.source, read(received.buffer))

    def take(self, transport: Transport, source: int, tries: int = 32) -> T | None:
        """Return the value of a waiting message of `source`, out of turn; None if there is none."""
        received = transport.take(source, self.tag, tries)
        return None if received is None else self.read(received.buffer)


def _numbers(values: Any) -> Buffer:
    return np.array(values, np.int64).reshape(-1).view(np.uint8)


def _write_object(value: object) -> Buffer:
    return np.frombuffer(pickle.dumps(value), np.uint8)


def _read_object(buffer: Buffer) -> Any:
    return pickle.loads(buffer.tobytes())


def _read_number(buffer: Buffer) -> int:
    return int(buffer.view(np.int64)[0])


def _number_rows(tag: Tag, width: int) -> Message[NumberRows]:
    return Message(tag, _numbers, lambda buffer: buffer.view(np.int64).reshape(-1, width).tolist())


def object_message(tag: Tag) -> Message[Any]:
    """Return a message type whose value is a small Python object: for cold paths."""
    return Message(tag, _write_object, _read_object)


def _batch(tag: Tag, dtype: np.dtype[np.void]) -> Message[Batch]:
    return Message(tag, Batch.pack, partial(Batch.unpack, dtype=dtype))


def _ids(tag: Tag) -> Message[list[int]]:
    """Return a message type whose value is a list of request ids."""
    return Message(tag, _numbers, lambda buffer: buffer.view(np.int64).tolist())


def _number(tag: Tag) -> Message[int]:
    return Message(tag, _numbers, _read_number)


# Control.
BEAT: Message[Beat] = object_message(Tag.BEAT)
ARRIVED: Message[Arrival] = object_message(Tag.ARRIVED)
RELEASE: Message[Release] = object_message(Tag.RELEASE)
FAILED: Message[Failure] = object_message(Tag.FAILED)
STOP: Message[Stop] = object_message(Tag.STOP)
BYE: Message[None] = object_message(Tag.BYE)
LOST: Message[InstanceLoss] = object_message(Tag.LOST)
EVENT: Message[Event] = object_message(Tag.EVENT)
STOPPED: Message[StoppedRank] = object_message(Tag.STOPPED)
# Route.
QUERY = _batch(Tag.QUERY, REQUEST)
WORK = _batch(Tag.WORK, REQUEST)
DONE = _batch(Tag.DONE, RESPONSE)
ANSWER = _batch(Tag.ANSWER, RESPONSE)
GRANT: Message[Grant] = Message(Tag.GRANT, _numbers, lambda buffer: Grant(*buffer.view(np.int64).tolist()))
WINDOW = _number(Tag.WINDOW)  # requests
CANCEL = _ids(Tag.CANCEL)
DROP = _ids(Tag.DROP)
RESET_CACHE: Message[None] = object_message(Tag.RESET_CACHE)
# (id, lost context instance) of each request of that instance; see roles/retries.py.
SETTLE = _number_rows(Tag.SETTLE, 2)
# Handoff, over the route: see roles/handoff.py.
OFFER = _batch(Tag.OFFER, REQUEST)
# (id, slot): the request is accepted; send its KV cache under this slot. NO_SLOT: the generation instance has
# dropped a request that ended with its first token.
ACCEPT = _number_rows(Tag.ACCEPT, 2)
# (id, token, cached): the request's first token, and the number of its prompt tokens that were in a KV cache.
# NO_TOKEN: the response ended with it. cached -1: not requested, or unknown.
FIRST = _number_rows(Tag.FIRST, 3)
WARM_UP = _number(Tag.WARM_UP)  # requests
