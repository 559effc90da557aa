"""The load of conversations in LoadGen's place: each request follows the response to the previous one.

A branch begins after a response of its parent, and has a session of its own. A turn that joins branches
waits for their ends, however they end, and its delay counts from there. Limits on open conversations count
root conversations, which are not branches. Each is open until all its branches have ended.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.comms.messages import Refusal, RequestFlag
from mpillm.data.conversations import Branch, Message
from mpillm.data.dataset import PromptTooLong, Turns
from mpillm.data.generated_history import History
from mpillm.loadgen.sut import Query
from mpillm.phases import Phase
from mpillm.roles.role import Role

_MAX_NAMED = 3  # places of prompts that are too long, for messages
_CANCELLATION = 4  # random stream of a seed; `synthetic_conversations` has others


@dataclass(frozen=True)
class LoadShape:
    """When conversations start, and for how long.

    With `concurrency`, a conversation starts when another one has ended. Otherwise conversations arrive: by
    `rate`, or else by the time stamps of their first requests.
    """

    n_conversations: int  # to start; after the data set's last one, its first one follows
    concurrency: int | None = None  # open conversations
    rate: float | None = None  # of arrivals, conversations per second
    burstiness: float = 1.0  # of arrivals at a rate; see `arrival_times`
    seed: int = 0  # of the arrivals, and of the choice of requests to cancel
    speed: float = 1.0  # divides time stamps and delays
    # Over which the first `concurrency` conversations start, evenly, or the rate grows to `rate`, linearly.
    ramp_up_s: float = 0.0
    max_s: float = math.inf  # after which no request is issued
    cancel_share: float = 0.0  # of the requests
    cancel_after_s: float = 0.0  # from sending a request to its cancellation


@dataclass
class _Tree:
    """A root conversation with all its branches."""

    session: int  # of the root conversation
    n_open: int = 0  # conversations that have begun and not ended
    has_failed: bool = False
    has_outgrown: bool = False


@dataclass
class _Open:
    """One started conversation."""

    first: int  # sample of its first request
    n_turns: int
    started: float  # seconds of the test
    number: int  # in the data set
    path: Sequence[int]  # number in the test, and of each branch to this one, from 1
    session: int  # never 0; another one each time
    tree: _Tree
    cancel_after: list[float]  # by turn: seconds from sending to cancellation; NaN: it is not cancelled
    turn: int = 0  # of the next request, or of the outstanding one
    responses: list[Any] = field(default_factory=list)  # if they are generated in the test: `History`'s
    prompt: NDArray[np.int32] | None = None  # of the next request; None: the data set's
    parent: _Open | None = None  # whose branch it is
    join: int | None = None  # the parent's turn that waits for its end
    n_joined: Counter[int] = field(default_factory=Counter)  # open branches, by the turn that waits for them
    is_waiting: bool = False  # for branches
    joined_at: dict[int, float] = field(default_factory=dict)  # by that turn: seconds, end of the last branch


class ConversationLoad(Role):
    """Issues the requests of conversations. The harness of the same rank sends them.

    `error` and `use_token_latencies` are LoadGen's; see `LoadGenTest`.
    """

    sends_requests = True
    error: BaseException | None = None
    use_token_latencies = False

    def __init__(
        self,
        turns: Turns,
        shape: LoadShape,
        history: History | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`history`: makes the prompts, if these have the responses of the test. `wake`: wakes the loop."""
        self.issued: deque[Query] = deque()
        self.n_started = self.n_ended = self.n_failed = 0  # root conversations
        self.n_branches = 0  # started
        self.root_sessions: dict[int, int] = {}  # by a branch's session
        # Sessions of root conversations with requests that were not sent for another reason than an error.
        self.cut_sessions: set[int] = set()
        # Requests of started conversations that an error, a limit or the end of the time has left out, with
        # those of their branches.
        self.n_skipped = 0
        self._n_scheduled = 0  # conversations; `max_s` may prevent some of them from starting
        self.window_s = (shape.ramp_up_s, shape.max_s)
        """Seconds of the test between ramp-up and drain: while all conversations are open, or arrive.
        Without such a time, all of the test after the ramp-up."""
        self._turns, self._shape = turns, shape
        self._roots = turns.roots
        self._numbers = {id(one): number for number, one in enumerate(turns.conversations)}
        self._branches = defaultdict[tuple[int, int], list[tuple[int, Branch]]](list)  # by number and turn
        for number, one in enumerate(turns.conversations):
            for i, branch in enumerate(one.branches, 1):
                self._branches[number, branch.after].append((i, branch))
        # A heap: seconds of the test, a number that breaks ties, conversation.
        self._due: list[tuple[float, int, _Open]] = []
        self._history, self._wake = history, wake
        self.request_flags = int(RequestFlag.PROMPT_COUNTS | RequestFlag.MAY_BE_REFUSED)
        if history is not None:
            self.request_flags |= RequestFlag.MESSAGE
        self.n_outgrown = 0  # root conversations with a prompt that exceeded a limit
        self.outgrown_at: list[str] = []  # places of the first such prompts
        self.n_too_long = 0  # such prompts that a server refused; these are failed requests
        self.first_failed = ""  # place of the first other failed request, and the server's reason
        self.n_unmade, self.problem = (
            0,
            "",
        )  # other prompts that could not be made, and the first one's problem
        self._messages: dict[int, Message] = {}  # by id, of outstanding requests
        self._refusals: dict[int, Refusal] = {}  # likewise
        # One thread makes prompts, so that the rank can do other work at that time.
        self._maker = ThreadPoolExecutor(1, "mpillm-history") if history is not None else None
        # With the times of their requests.
        self._prompts_to_come: dict[Future[NDArray[np.int32]], tuple[_Open, float]] = {}
        self._order = itertools.count()
        self._ids = itertools.count(1)
        # Random, so that a server knows no session of an earlier test.
        self._sessions = itertools.count(1 + secrets.randbits(31))
        self._outstanding: dict[int, _Open] = {}
        self._started_at = math.inf  # time.perf_counter() of the test's start
        self._schedule_arrivals()  # not in `start`: the first requests would be late

    @property
    def finished(self) -> bool:
        """Whether every request has its response."""
        started = self._started_at < math.inf
        return started and not (self._due or self._outstanding or self._prompts_to_come)

    def start(self) -> None:
        """Start the test."""
        self._started_at = time.perf_counter()

    def _now(self) -> float:
        """Return the seconds of the test."""
        return time.perf_counter() - self._started_at

    def _schedule_arrivals(self) -> None:
        shape = self._shape
        if shape.concurrency is not None:
            n = min(shape.concurrency, shape.n_conversations)
            arrivals = np.arange(n) * (shape.ramp_up_s / shape.concurrency)
        else:
            arrivals = self._arrivals()
            self._end_window(float(arrivals.max()))
        for at in arrivals.tolist():
            self._start_conversation(at)

    def _arrivals(self) -> NDArray[np.float64]:
        """Return when each conversation arrives, in seconds from the test's start."""
        n, n_known = self._shape.n_conversations, len(self._roots)
        if self._shape.rate is not None:
            return arrival_times(n, self._shape.rate, self._shape)
        stamps = self._turns.at_s[self._turns.first[self._roots]]
        stamps = (stamps - stamps.min()) / self._shape.speed
        span = stamps.max() * n_known / max(1, n_known - 1)  # until the trace begins again
        number = np.arange(n)
        arrivals: NDArray[np.float64] = stamps[number % n_known] + number // n_known * span
        return arrivals

    def _start_conversation(self, at: float) -> None:
        number = int(self._roots[self._n_scheduled % len(self._roots)])
        self._n_scheduled += 1
        tree = _Tree(next(self._sessions))
        self._schedule(at, self._open(number, at, [self._n_scheduled], tree, tree.session))

    def _open(self, number: int, at: float, path: Sequence[int], tree: _Tree, session: int) -> _Open:
        first, end = self._turns.first[number : number + 2].tolist()
        tree.n_open += 1
        cancel_after = self._cancel_after(end - first, path)
        return _Open(first, end - first, at, number, path, session, tree, cancel_after)

    def _begin_branch(self, i: int, branch: Branch, parent: _Open, now: float) -> None:
        number = self._numbers[id(branch.conversation)]
        session = next(self._sessions)
        self.root_sessions[session] = parent.tree.session
        conversation = self._open(number, now, [*parent.path, i], parent.tree, session)
        conversation.parent, conversation.join = parent, branch.join
        at = self._next_at(conversation, now)
        if branch.conversation.n_inherited and self._history is not None:
            conversation.responses = list(parent.responses)
            self._make_prompt(conversation, at)
        else:
            self._schedule(at, conversation)

    def _cancel_after(self, n_turns: int, path: Sequence[int]) -> list[float]:
        """Return which requests of the conversation that starts are cancelled, and when."""
        if not (share := self._shape.cancel_share):
            return [math.nan] * n_turns
        # A stream for each conversation, so that the choice does not depend on the order of responses.
        random = np.random.default_rng([self._shape.seed, _CANCELLATION, *path])
        chosen = random.random(n_turns) < share
        return [self._shape.cancel_after_s if one else math.nan for one in chosen.tolist()]

    def _schedule(self, at: float, conversation: _Open) -> None:
        if at > self._shape.max_s:
            if conversation.turn or conversation.parent is not None:  # its tree has started
                self._skip(conversation, conversation.turn)
                self.cut_sessions.add(conversation.tree.session)
            self._join(conversation, at)  # a turn that waits for it has a later time
            return
        heapq.heappush(self._due, (at, next(self._order), conversation))

    def _skip(self, conversation: _Open, turn: int) -> None:
        """Count the requests that are not sent, and the branches of the responses from `turn` on."""
        self.n_skipped += conversation.n_turns - conversation.turn
        for branch in self._turns.conversations[conversation.number].branches:
            if branch.after >= turn:
                self.n_skipped += sum(len(one.turns) for one in branch.conversation.tree())

    # --- the role ---

    def poll(self) -> bool:
        self._take_prompts()
        now = time.perf_counter()
        rows: list[tuple[int, int, NDArray[np.int32] | None, int, float]] = []
        while self._due and self._started_at + self._due[0][0] <= now:
            _, _, conversation = heapq.heappop(self._due)
            id_ = next(self._ids)
            self._outstanding[id_] = conversation
            if conversation.turn == 0:
                self.n_started += conversation.parent is None
                self.n_branches += conversation.parent is not None
            sample, cancel_after = conversation.first + conversation.turn, conversation.cancel_after
            rows.append(
                (id_, sample, conversation.prompt, conversation.session, cancel_after[conversation.turn])
            )
            conversation.prompt = None
        if not rows:
            return False
        ids, samples, prompts, sessions, cancellations = zip(*rows, strict=True)
        self.issued.append(
            Query(
                np.array(ids, np.uint64),
                np.array(samples, np.int64),
                now,
                None if self._history is None else prompts,
                np.array(sessions, np.uint32),
                np.array(cancellations) if self._shape.cancel_share else None,
            )
        )
        return True

    def _take_prompts(self) -> None:
        """Schedule the requests whose prompts are complete. A conversation that outgrows a limit ends."""
        for future in [future for future in self._prompts_to_come if future.done()]:
            conversation, at = self._prompts_to_come.pop(future)
            try:
                conversation.prompt = future.result()
            except ConfigError as error:
                self._end_early(conversation, error)
            else:
                self._schedule(at, conversation)

    def _end_early(self, conversation: _Open, error: ConfigError) -> None:
        """End a conversation whose next prompt cannot be made."""
        tree = conversation.tree
        if isinstance(error, PromptTooLong):
            self._note_outgrown(tree, self._place(conversation, conversation.turn))
        else:
            self._note_failed(tree)
            self.n_unmade += 1
            self.problem = self.problem or str(error)
        self.cut_sessions.add(tree.session)
        self._skip(conversation, conversation.turn)
        self._end(conversation, self._now())

    def _note_error(self, conversation: _Open, refusal: Refusal | None) -> None:
        """Note that the last request of a conversation has failed."""
        place = self._place(conversation, conversation.turn - 1)
        if refusal is not None and refusal.is_too_long:
            self.n_too_long += 1
            self._note_outgrown(conversation.tree, place)
            return
        self._note_failed(conversation.tree)
        self.first_failed = self.first_failed or (f"{place}: {refusal.message}" if refusal else place)

    def _note_outgrown(self, tree: _Tree, place: str) -> None:
        self.n_outgrown += not tree.has_outgrown
        tree.has_outgrown = True
        if place not in self.outgrown_at and len(self.outgrown_at) < _MAX_NAMED:
            self.outgrown_at.append(place)

    def _note_failed(self, tree: _Tree) -> None:
        self.n_failed += not tree.has_failed
        tree.has_failed = True

    def _place(self, conversation: _Open, turn: int) -> str:
        return self._turns.conversations[conversation.number].turns[turn].where

    def quiet_s(self) -> float:
        if not self._due:
            return math.inf
        return max(0.0, self._started_at + self._due[0][0] - time.perf_counter())

    def done(self, phase: Phase) -> bool:
        return phase != "test" or self.finished

    # --- responses, from the harness ---

    def first_tokens(self, ids: list[int], tokens: NDArray[np.int32], starts: list[int]) -> None:
        """Do nothing: the harness records the time of first tokens."""

    def complete(
        self, ids: list[int], tokens: NDArray[np.int32], starts: list[int], lengths: list[int], is_error: bool
    ) -> None:
        """Schedule the requests and the branches that follow these responses. After an error, none follow.

        The response to a cancelled request has no tokens.
        """
        now = self._now()
        for id_, start, length in zip(ids, starts, lengths, strict=True):
            conversation = self._outstanding.pop(id_)
            conversation.turn += 1
            message = self._messages.pop(id_, None)
            is_last = conversation.turn == conversation.n_turns
            if is_error:
                self._note_error(conversation, self._refusals.pop(id_, None))
                self._skip(conversation, conversation.turn - 1)
                self._end(conversation, now)
                continue
            branches = self._branches.get((conversation.number, conversation.turn - 1), [])
            if self._history is not None and (branches or not is_last):
                response = message or self._history.message(tokens[start : start + length])
                conversation.responses.append(response)
            conversation.n_joined.update(branch.join for _, branch in branches if branch.join is not None)
            for i, branch in branches:
                self._begin_branch(i, branch, conversation, now)
            if is_last:
                self._end(conversation, now)
            else:
                self._continue(conversation, now)

    def _continue(self, conversation: _Open, now: float) -> None:
        """Schedule the next request, unless it waits for branches: then the end of the last one does this."""
        conversation.is_waiting = conversation.n_joined[conversation.turn] > 0
        if conversation.is_waiting:
            return
        at = self._next_at(conversation, max(now, conversation.joined_at.get(conversation.turn, 0.0)))
        if self._history is None:
            self._schedule(at, conversation)
        else:
            self._make_prompt(conversation, at)

    def _join(self, branch: _Open, now: float) -> None:
        """Note for the parent that a branch has ended."""
        if branch.parent is None or branch.join is None:
            return
        parent = branch.parent
        parent.n_joined[branch.join] -= 1
        parent.joined_at[branch.join] = max(parent.joined_at.get(branch.join, 0.0), now)
        if parent.is_waiting and not parent.n_joined[parent.turn]:
            self._continue(parent, now)

    def message(self, id_: int, text: bytes) -> None:
        """Take the response's message, before `complete`."""
        self._messages[id_] = json.loads(text)

    def refused(self, id_: int, refusal: Refusal) -> None:
        """Take a server's reason for an error, before `complete`."""
        self._refusals[id_] = refusal

    def _make_prompt(self, conversation: _Open, at: float) -> None:
        assert self._maker is not None and self._history is not None
        future = self._maker.submit(self._history.prompt, conversation.number, list(conversation.responses))
        self._prompts_to_come[future] = conversation, at
        future.add_done_callback(lambda _: self._wake())

    def _next_at(self, conversation: _Open, now: float) -> float:
        sample, speed = conversation.first + conversation.turn, self._shape.speed
        at = now + float(self._turns.delay_s[sample]) / speed
        since_first = float(self._turns.at_s[sample] - self._turns.at_s[conversation.first]) / speed
        return at if math.isnan(since_first) else max(at, conversation.started + since_first)

    def _end(self, conversation: _Open, now: float) -> None:
        """Note that a conversation has ended. After the last one of a tree, start another tree."""
        self._join(conversation, now)
        conversation.tree.n_open -= 1
        if conversation.tree.n_open:
            return
        self.n_ended += 1
        if self._shape.concurrency is None:
            return
        if self._n_scheduled < self._shape.n_conversations:
            self._start_conversation(now)
        else:
            self._end_window(now)

    def _end_window(self, at: float) -> None:
        start, end = self.window_s
        if start < at < end:
            self.window_s = start, at


def arrival_times(n: int, rate: float, shape: LoadShape) -> NDArray[np.float64]:
    """Return when `n` conversations arrive, in seconds from the test's start.

    The intervals between arrivals have a gamma distribution with the shape `burstiness`, as in vLLM's
    benchmark: 1 is Poisson, smaller values are bursts, inf is constant intervals. During the ramp-up, the
    rate grows linearly from 0.
    """
    random, burstiness = np.random.default_rng(shape.seed), shape.burstiness
    if burstiness == 1:
        intervals = random.exponential(1, n)
    elif math.isinf(burstiness):
        intervals = np.ones(n)
    else:
        intervals = random.gamma(burstiness, 1 / burstiness, n)
    count = intervals.cumsum()  # expected arrivals before each one: the integral of the rate
    in_ramp = rate * shape.ramp_up_s / 2
    during = np.sqrt(2 * shape.ramp_up_s * count / rate)
    after = shape.ramp_up_s + (count - in_ramp) / rate
    times: NDArray[np.float64] = np.where(count < in_ramp, during, after)
    return times
