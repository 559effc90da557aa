"""Clients of servers behind `serve`: tokens as they come, and requests that fail alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mpillm.comms.messages import Refusal, RequestFlag, ResponseFlag
from mpillm.cores.capabilities import OutlivesServer, WorksInAnyThread
from mpillm.cores.openai_client.client import Client
from mpillm.cores.openai_client.client_thread import ClientThread
from mpillm.data.tokenizer import load_tokenizer
from tests.helpers.endpoint_cores import (
    CANCELLED,
    FINAL,
    FIRST,
    Rows,
    core_of,
    failure,
    refuses,
    requests,
    started,
)
from tests.helpers.scripted_server import (
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    choice,
    chunk,
    event,
    good,
    plain,
)
from tests.helpers.support import wait_until

PARTIAL, ERROR = int(ResponseFlag.PARTIAL), int(ResponseFlag.ERROR)
REFUSED = int(ResponseFlag.REFUSED)
LIVE = {"flags": RequestFlag.STREAM}


def begins(*pieces: dict[str, object]) -> Callable[[Request], Reply]:
    """Return what answers with the beginning of a stream, and then hangs."""

    def answer(request: Request) -> Reply:
        if not request.json.get("stream"):
            return good(request)
        return Reply([STREAM, *(chunk(event(piece)) for piece in pieces)], "hang")

    return answer


def partial_tokens(rows: Rows) -> list[int]:
    """Return the tokens before the final row; only the first row has the flag FIRST."""
    assert [flags for _, flags, _ in rows.rows] in ([], [FIRST, *[PARTIAL] * (len(rows.rows) - 1)])
    return [token for _, _, tokens in rows.rows for token in tokens]


def test_tokens_come_one_by_one() -> None:
    """In any scenario, if the request has the flag for it."""
    answer = begins(choice([77], "a"), choice([78, 79], "b"), choice([80], "c"))
    with ScriptedServer(answer) as server, started(server, serves=True) as core:
        core.enqueue(requests([[1]], max_output=9, **LIVE))
        rows = Rows(core)
        wait_until(lambda: not rows.poll() and len(partial_tokens(rows)) == 4, "four tokens")
        assert partial_tokens(rows) == [77, 78, 79, 80] and rows.rows[0][2] == [77]
        core.cancel([10])
        assert rows.until(1)[-1] == (10, FINAL | CANCELLED, [])


def test_the_end_has_all_tokens() -> None:
    with ScriptedServer() as server, started(server, serves=True) as core:
        core.enqueue(requests([[4]], max_output=6, **LIVE))
        *before, last = Rows(core).until(1)
        assert last == (10, FINAL if before else FIRST | FINAL, [4, 5, 6, 7, 8, 9])
        begun = [token for _, _, tokens in before for token in tokens]
        assert begun == [4, 5, 6, 7, 8, 9][: len(begun)]
        core.enqueue(requests([[4]], id=11))  # this one wants it whole
        assert Rows(core).until(1) == [(11, FIRST | FINAL, [4, 5, 6, 7])]
        assert "stream" not in server.bodies()[-1]


@pytest.fixture(params=[False, True], ids=["by pieces", "adds spaces"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bool]:
    """Return the folder of one, and whether it puts a space before each text."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "▁"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    if request.param:
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
        made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    else:
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path, request.param


@pytest.mark.parametrize("ends", [False, True])
def test_text_becomes_tokens_as_it_comes(ends: bool, tokenizer: tuple[Path, bool]) -> None:
    """Unless pieces of a text are other tokens than the whole: then all comes with the end."""
    folder, adds_spaces = tokenizer
    pieces = [choice(None, text) for text in ("Hi", "\ud83d", "\ude00, y", "ou")]
    end = [choice(None, "!", "stop")] if ends else []

    def answer(request: Request) -> Reply:
        if not request.json.get("stream"):
            return plain(choice(None, "x", "stop"))
        chunks = [chunk(event(piece)) for piece in [*pieces, *end]]
        return Reply([STREAM, *chunks, chunk(b"")] if ends else [STREAM, *chunks], "keep" if ends else "hang")

    with ScriptedServer(answer) as server, started(server, "--model_path", folder, serves=True) as core:
        core.enqueue(requests([[72]], max_output=64, **LIVE))
        rows, read = Rows(core), load_tokenizer(folder)
        if not ends and not adds_spaces:
            wait_until(
                lambda: not rows.poll() and read.decode(partial_tokens(rows)) == "Hi😀, you", "the text"
            )
        if ends:
            *before, (_, flags, tokens) = rows.until(1)
            assert read.decode(tokens) == ("Hi, you!" if adds_spaces else "Hi😀, you!")
            begun = [token for row in before for token in row[2]]
            assert begun == tokens[: len(begun)] and flags == (FINAL if before else FIRST | FINAL)
            assert not (adds_spaces and before)


def test_a_request_that_is_refused_fails_alone() -> None:
    """The refusal has the server's message as one line of text."""
    replies: dict[int, Reply] = {
        52: plain({"error": {"message": "too\x1b[31m long"}}, "400 Bad Request"),
        53: Reply([STREAM, chunk(event(choice([7], "a")))], "close"),
        54: plain({"object": "error", "message": "no such model", "code": 404}, "404 Not Found"),
        55: plain({"error": "x" * 5000}, "413 Payload Too Large"),
        56: plain({"error": {"message": "full"}}, "429 Too Many Requests", Retry_After="3600.5"),
        57: plain({}, "503 Service Unavailable", Retry_After=10**9),
        58: plain({"detail": "bad key"}, "401 Unauthorized"),
        59: Reply([STREAM, chunk(event({"error": {"message": "too many", "code": 400}})) + chunk(b"")]),
        60: plain({"error": {"message": "ouch \ud800"}}, "500 Internal Server Error"),
        61: plain({"error": "later"}, "503 Service Unavailable", Retry_After="inf"),
        62: plain({"error": "odd"}, "999 Odd"),
    }
    refusals = {
        52: (400, "too\\x1b[31m long", 0),
        53: (502, "the server behind this one did not answer; its rank's log has the cause", 0),
        54: (404, "no such model", 0),
        55: (413, "x" * 300, 0),
        56: (429, "full", 3601),
        57: (503, "{}", 86_400),
        58: (502, "the server behind this one answered HTTP 401: bad key", 0),
        59: (400, "too many", 0),
        60: (500, "ouch \\ud800", 0),
        61: (503, "later", 86_400),
        62: (502, "the server behind this one answered HTTP 999: odd", 0),
    }

    def answer(request: Request) -> Reply:
        return replies.get(request.json["prompt"][0]) or good(request)

    with ScriptedServer(answer) as server, started(server, serves=True) as core:
        core.enqueue(requests([[n] for n in (51, *replies)], **LIVE))
        rows = Rows(core).until(1 + len(replies))
    ended = {id_ + 41: (flags & ~FIRST, tokens) for id_, flags, tokens in rows if flags & FINAL}
    assert ended == {51: (FINAL, [51, 52, 53, 54])} | dict.fromkeys(replies, (FINAL | ERROR, []))
    refused = [
        (i, id_ + 41, Refusal.of(tokens)) for i, (id_, flags, tokens) in enumerate(rows) if flags & REFUSED
    ]
    assert {n: refusal[:3] for _, n, refusal in refused} == refusals
    assert all(rows[i + 1][:2] == (n - 41, FINAL | ERROR) for i, n, _ in refused)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_refused_request_is_not_sent_again(restarts: bool) -> None:
    """Also where the server may be started again: it would refuse the request again."""

    def answer(request: Request) -> Reply:
        return plain({"error": "no"}, "400 Bad Request") if request.json["prompt"] == [52] else good(request)

    with (
        ScriptedServer(answer) as server,
        started(server, serves=True, restarts=restarts) as core,
    ):
        core.enqueue(requests([[52]], **LIVE))
        Rows(core).until(1)
        assert core.statistics()["retries"] == 0


def test_an_option_that_a_server_lacks_is_its_clients_mistake(tokenizer: tuple[Path, bool]) -> None:
    def text_only(request: Request) -> Reply:
        if not isinstance(request.json["prompt"], str) or "top_k" in request.json:
            return plain({"error": "text only"}, "422 Unprocessable Entity")
        return plain(choice(None, "x", "stop"))

    with (
        ScriptedServer(text_only) as server,
        started(server, "--model_path", tokenizer[0], serves=True) as core,
    ):
        core.enqueue(requests([[72]], top_k=4, **LIVE))
        (_, kind, numbers), (_, flags, _) = Rows(core).until(1)
        assert kind == REFUSED and flags == FINAL | ERROR
        assert Refusal.of(numbers).status == 400 and "top_k" in Refusal.of(numbers).message


def test_a_server_that_refuses_what_warms_it_up_is_not_ready() -> None:
    with ScriptedServer() as server, core_of(server.address, serves=True) as core:
        core.load()
        core.run_health_check()
        server.completions = refuses("max_tokens")
        core.enqueue(core.warm_up_requests())
        assert "max_tokens" in failure(core)


@pytest.mark.parametrize("serves", [False, True])
def test_a_server_that_is_gone_is_everybodys_failure(serves: bool) -> None:
    with (
        ScriptedServer() as server,
        started(server, serves=serves, core_options={"retry_s": 0.5}) as core,
    ):
        server.stop()
        core.enqueue(requests([[1]], **LIVE))
        assert "retried" in failure(core)


def test_a_server_that_was_started_again_may_not_answer_otherwise() -> None:
    """A client that has read the beginning of one answer does not get the end of another."""
    with (
        ScriptedServer(begins(choice([77], "a"))) as first,
        ScriptedServer() as second,
        started(first, serves=True, restarts=True) as core,
    ):
        core.enqueue(requests([[1]], **LIVE))
        core.enqueue(requests([[77]], id=20, **LIVE))
        rows = Rows(core)
        wait_until(lambda: not rows.poll() and len(rows.rows) == 2, "the first tokens")
        assert isinstance(core, OutlivesServer)
        core.server_lost()
        core.server_back(second.address)
        ended = {id_: (flags, tokens) for id_, flags, tokens in rows.until(2) if flags & FINAL}
        assert ended == {10: (FINAL | ERROR, []), 20: (FINAL, [77, 78, 79, 80])}


def test_a_client_in_the_endpoint_s_thread() -> None:
    """There requests are sent, and answers read, and it goes on without the client."""
    thread, wakes = ClientThread("mpillm-endpoint"), set[int | None]()
    with ScriptedServer() as server, core_of(server.address, serves=True) as core:
        assert isinstance(core, WorksInAnyThread)
        core.share(thread)
        core.wake = lambda: wakes.add(threading.get_ident())
        core.load()
        core.run_health_check()
        core.enqueue(requests())
        Rows(core).until(4)
        assert wakes == {thread.run(_ident(), 60)}
        core.notify_stop()
        wait_until(lambda: not server.has_clients(), "its connections to be closed")
    assert thread.runs
    thread.stop()
    assert not thread.runs


def test_an_error_of_our_own_in_the_endpoint_s_thread_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although that thread goes on after what its connections raise."""
    thread = ClientThread("mpillm-endpoint", uncaught=lambda *_: None)
    with ScriptedServer() as server, core_of(server.address, serves=True) as core:
        assert isinstance(core, WorksInAnyThread)
        core.share(thread)
        core.load()
        core.run_health_check()
        monkeypatch.setattr(Client, "submit", lambda *_: 1 // 0)
        core.enqueue(requests())
        wait_until(core.has_work, "the error to be seen")
        with pytest.raises(RuntimeError, match="the HTTP client failed") as raised:
            core.poll_responses()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    thread.stop()


async def _ident() -> int:
    return threading.get_ident()
