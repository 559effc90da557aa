"""The cores that are clients of servers, in this process, against a scripted server: answers, and every
fault."""

from __future__ import annotations

import itertools
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch, RequestFlag, ResponseFlag
from mpillm.config.core_config import CoreConfig
from mpillm.config.options import parse_run
from mpillm.cores.base import LLMCore
from mpillm.cores.clients import share_of
from mpillm.cores.openai_client.client import Call, Client, Listener
from mpillm.cores.openai_client.dialect import Sampling
from mpillm.cores.openai_client.endpoint import Endpoint
from mpillm.cores.openai_client.endpoint_core import TrtllmEndpointCore
from mpillm.cores.registry import BackendRegistry
from mpillm.errors import RunError
from tests.helpers.scripted_server import (
    DONE,
    MODEL,
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    answer_of,
    choice,
    chunk,
    event,
    good,
    head,
    plain,
)
from tests.helpers.support import wait_until

FIRST, FINAL, CANCELLED = ResponseFlag.FIRST, ResponseFlag.FINAL, ResponseFlag.CANCELLED
PROMPTS = [[1], [2, 3], [5, 6, 7], [20] * 50]


def requests(prompts: Sequence[Sequence[int]] = PROMPTS, max_output: int = 4, **fields: Any) -> Batch:
    """Greedy requests with ids from 10 on."""
    rows = np.zeros(len(prompts), REQUEST)
    rows["id"] = np.arange(10, 10 + len(prompts))
    rows["n_tokens"] = [len(prompt) for prompt in prompts]
    rows["max_output"] = max_output
    rows["top_p"] = 1
    rows["generation"] = NO_INSTANCE
    for name, value in fields.items():
        rows[name] = value
    return Batch(rows, np.array(list(itertools.chain(*prompts)), np.int32))


@contextmanager
def core_of(
    urls: str, *options: object, core_options: dict[str, Any] | None = None, **config: Any
) -> Iterator[LLMCore]:
    """A core with the values of a run's command line; it is stopped in the end."""
    run = parse_run(["--core_type=trtllm_endpoint", f"--trtllm_server_urls={urls}", *map(str, options)])
    core_config = CoreConfig(
        core_type=run.core_type, rank=2, options=core_options or {}, model_path=run.model_path, **config
    )
    core_class = BackendRegistry.get(run.core_type)
    with run.autoapply():
        core_class.check(core_config)
        core = core_class(core_config)
    try:
        yield core
    finally:
        core.notify_stop()


@contextmanager
def started(server: ScriptedServer, *options: object, **config: Any) -> Iterator[LLMCore]:
    """A core that is ready to be given requests."""
    with core_of(server.address, *options, **config) as core:
        core.load()
        core.run_health_check()
        core.start_test()
        yield core


class Rows:
    """The responses of a core, row by row."""

    def __init__(self, core: LLMCore) -> None:
        self._core = core
        self.rows: list[tuple[int, int, list[int]]] = []  # id, flags, tokens

    def poll(self) -> Counter[int]:
        """Take what is there; how often each request has ended."""
        if self._core.has_work() and (batch := self._core.poll_responses()) is not None:
            for one in batch.split():
                self.rows.append((int(one.rows["id"][0]), int(one.rows["flags"][0]), one.tokens.tolist()))
        return Counter(id_ for id_, flags, _ in self.rows if flags & FINAL)

    def until(self, n: int) -> list[tuple[int, int, list[int]]]:
        """Return all rows when `n` requests have ended, each of them once."""
        wait_until(lambda: len(self.poll()) >= n, f"{n} answers")
        assert set(self.poll().values()) == {1}
        return self.rows


def failure(core: LLMCore) -> str:
    """Return the message that ends the run."""
    rows = Rows(core)
    with pytest.raises(RunError) as caught:
        wait_until(lambda: not rows.poll() and False, "a failure")
    (told,) = caught.value.failures
    assert told.rank == 2 and told.traceback == ""
    return told.cause


SERVER = "--scenarios=Server"


def test_answers_in_one_piece() -> None:
    """Offline: nobody asks for first tokens, so nothing is streamed."""
    with ScriptedServer() as server, started(server) as core:
        core.enqueue(requests())
        assert sorted(Rows(core).until(4)) == [
            (10 + i, FIRST | FINAL, answer_of(prompt, 4)) for i, prompt in enumerate(PROMPTS)
        ]
        assert "stream" not in server.asked()[-1]
        assert core.metrics() == (sum(map(len, PROMPTS)), 16, 0, 0, None)
        statistics = core.statistics()
    assert statistics["retries"] == statistics["retokenized"] == statistics["other_answer_length"] == 0
    assert 0 < statistics["client_busy_fraction"] <= 1


def test_answers_token_by_token() -> None:
    with ScriptedServer() as server, started(server, SERVER) as core:
        core.enqueue(requests())
        rows = Rows(core).until(4)
        for i, prompt in enumerate(PROMPTS):
            answer = answer_of(prompt, 4)
            assert [row[1:] for row in rows if row[0] == 10 + i] in (
                [(FIRST, answer[:1]), (FINAL, answer)],
                [(FIRST | FINAL, answer)],
            )
        assert server.asked()[-1]["stream_options"] == {"include_usage": True}
        assert core.metrics() == (sum(map(len, PROMPTS)), 16, 0, 0, None)
        statistics = core.statistics()
    assert statistics["socket_ttft_p50_ms"] > 0


def test_the_first_token_does_not_wait_for_the_last() -> None:
    def half(request: Request) -> Reply:
        if not request.json.get("stream"):
            return good(request)
        return Reply([STREAM + chunk(event(choice([77], "a")))], "hang")

    with ScriptedServer(half) as server, started(server, SERVER) as core:
        core.enqueue(requests([[1]]))
        rows = Rows(core)
        wait_until(lambda: rows.poll() or rows.rows, "the first token")
        assert rows.rows == [(10, FIRST, [77])]
        metrics = core.metrics()
        assert metrics is not None and (metrics.generated_tokens, metrics.running) == (1, 1)
        core.cancel([10, 11])
        assert rows.until(1)[1:] == [(10, FINAL | CANCELLED, [])]


def test_what_a_request_says() -> None:
    with ScriptedServer() as server, started(server, SERVER, end_ids=(9,), stop_words=("###", (13,))) as core:
        core.enqueue(requests([[1, 2]], temperature=0.5, top_k=3, top_p=0.75, seed=7, min_output=2))
        core.enqueue(requests([[3]], id=20, flags=RequestFlag.IGNORE_STOP))
        Rows(core).until(2)
        first, second = sorted(server.asked()[-2:], key=lambda one: -len(one["prompt"]))
    common = {
        "model": MODEL,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    drawn = {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "seed": 7, "min_tokens": 2}
    assert first == {**common, **drawn, "prompt": [1, 2], "stop": ["###"], "stop_token_ids": [13, 9]}
    assert second == {**common, "prompt": [3], "temperature": 0, "stop_token_ids": [9]}


def test_a_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with ScriptedServer() as server, started(server):
        assert {request.headers.get("authorization") for request in server.requests} == {"Bearer secret"}


def test_connections_are_kept() -> None:
    with ScriptedServer() as server, started(server) as core:
        rows = Rows(core)
        for n in range(1, 6):
            core.enqueue(requests([[n]], id=n))
            rows.until(n)
        assert (
            len({request.connection for request in server.requests if request.path == "/v1/completions"}) == 2
        ), "the probe's, and one"


def test_several_servers() -> None:
    with (
        ScriptedServer() as one,
        ScriptedServer() as other,
        core_of(f"{one.address},{other.address}", SERVER) as core,
    ):
        core.load()
        core.run_health_check()
        probes = len(one.asked()), len(other.asked())
        core.enqueue(requests([[i] for i in range(1, 21)]))
        Rows(core).until(20)
        asked = len(one.asked()) - probes[0], len(other.asked()) - probes[1]
    assert sum(asked) == 20 and min(asked) > 0


@pytest.mark.parametrize(
    ("n_clients", "shares"),
    [
        (1, [(["a", "b", "c"], 8)]),
        (2, [(["a", "c"], 8), (["b"], 8)]),
        (3, [(["a"], 8), (["b"], 8), (["c"], 8)]),
        (5, [(["a"], 4), (["b"], 4), (["c"], 8), (["a"], 4), (["b"], 4)]),
        (7, [(["a"], 3), (["b"], 4), (["c"], 4), (["a"], 3), (["b"], 4), (["c"], 4), (["a"], 2)]),
    ],
)
def test_clients_share_servers(n_clients: int, shares: list[tuple[list[str], int]]) -> None:
    """Each server has its limit, however many clients there are."""
    assert [share_of("abc", 8, i, n_clients) for i in range(n_clients)] == shares


@pytest.mark.parametrize(
    ("options", "credits"),
    [
        ([], 2 * 1024),
        (["--max_batch_size=8"], 16),
        (["--trtllm_runtime_flags=max_concurrency:3", "--max_batch_size=8"], 6),
    ],
)
def test_credits(options: list[str], credits: int) -> None:
    with (
        ScriptedServer() as one,
        ScriptedServer() as other,
        core_of(f"{one.address},{other.address}", *options) as core,
    ):
        core.load()
        assert core.credits().requests == credits


# --- servers that speak otherwise ---


def refuses(*names: str, status: str = "400 Bad Request") -> Callable[[Request], Reply]:
    """Return a server that knows no fields of these names."""

    def answer(request: Request) -> Reply:
        if wrong := [name for name in names if name in request.json]:
            return plain({"error": {"message": f"unknown field {wrong[0]}"}}, status)
        return good(request)

    return answer


def test_a_server_with_detokenize() -> None:
    """TensorRT-LLM's: it refuses what it does not know, and gives token ids in place of text."""
    with ScriptedServer(refuses("return_token_ids")) as server, started(server) as core:
        core.enqueue(requests([[4, 5]]))
        assert Rows(core).until(1) == [(10, FIRST | FINAL, answer_of([4, 5], 4))]
        assert server.asked()[-1]["detokenize"] is False


TEXT = "Hello, world"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer that makes each character of ASCII a token."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    vocab = {chr(i): i for i in range(32, 127)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    return folder


def text_only(request: Request) -> Reply:
    """`transformers serve`: text in, text out, no unknown fields, and no [DONE]."""
    asked = request.json
    if not isinstance(asked["prompt"], str):
        return plain({"detail": "prompt must be a string."}, "400 Bad Request")
    if unknown := set(asked) - {
        "model",
        "prompt",
        "max_tokens",
        "temperature",
        "stream",
        "stop",
        "seed",
        "top_p",
    }:
        return plain({"detail": f"Unexpected fields in the request: {unknown}"}, "422 Unprocessable Entity")
    text = asked["prompt"][::-1][: asked["max_tokens"]]
    counts = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": len(text)}
    if not asked.get("stream"):
        return plain({**choice(None, text, "stop"), "usage": counts})
    pieces = [chunk(event(choice(None, text[i : i + 3]))) for i in range(0, len(text), 3)]
    return Reply([STREAM, *pieces, chunk(event({**choice(None, "", "stop"), "usage": counts})) + chunk(b"")])


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_a_server_of_text(tokenizer_folder: Path, scenario: str) -> None:
    prompt = [ord(letter) for letter in TEXT]
    with (
        ScriptedServer(text_only) as server,
        started(
            server,
            f"--scenarios={scenario}",
            f"--model_path={tokenizer_folder}",
            core_options={"model": MODEL},
        ) as core,
    ):
        core.enqueue(requests([prompt], max_output=7))
        (*first, last) = Rows(core).until(1)
        assert last[2] == prompt[::-1][:7]
        assert all(row == (10, FIRST, [ord("d")]) for row in first)
        statistics = core.statistics()
    assert (
        statistics["retokenized"],
        statistics["other_prompt_length"],
        statistics["other_answer_length"],
    ) == (1, 0, 0)


def test_what_a_server_of_text_lacks(tokenizer_folder: Path) -> None:
    with (
        ScriptedServer(text_only) as server,
        started(server, f"--model_path={tokenizer_folder}", core_options={"model": MODEL}) as core,
    ):
        core.enqueue(requests([[65]], min_output=3))
        assert failure(core).startswith(f"{server.url}/v1/completions: it has no min_tokens")


def test_text_without_a_tokenizer() -> None:
    with ScriptedServer(text_only) as server, pytest.raises(RunError) as caught, started(server):
        pass
    assert re.match(f"{server.url}.* gives no token ids: .*--model_path", str(caught.value))


def test_tokens_made_from_text_in_a_test_of_tokens(tokenizer_folder: Path) -> None:
    """TEST06 compares first tokens and end tokens: those of the server, not those made here."""
    options = (f"--model_path={tokenizer_folder}", "--compliance_test=TEST06")
    with (
        ScriptedServer(text_only) as server,
        pytest.raises(RunError) as caught,
        started(server, *options, core_options={"model": MODEL}),
    ):
        pass
    assert re.match(f"{server.url}.* gives no token ids: .*TEST06 checks", str(caught.value))
    with ScriptedServer() as server, started(server, "--compliance_test=TEST06"):
        pass


# --- models ---


def models(*names: str) -> dict[str, Callable[[Request], Reply]]:
    return {"/v1/models": lambda request: plain({"data": [{"id": name} for name in names]})}


@pytest.mark.parametrize(
    ("names", "wanted", "words"),
    [
        (
            ["llama-2-70b", "mixtral"],
            "llama-2-7b",
            r"it has no model llama-2-7b \(did you mean 'llama-2-70b'\?\); it has llama-2-70b",
        ),
        (["a", "b"], None, "lists a, b: name one with --core_options model:NAME"),
        ([], None, "lists no model: name one"),
    ],
)
def test_a_missing_model(names: list[str], wanted: str | None, words: str) -> None:
    options = {} if wanted is None else {"model": wanted}
    with (
        ScriptedServer(others=models(*names)) as server,
        pytest.raises(RunError) as caught,
        started(server, core_options=options),
    ):
        pass
    assert re.match(f"{server.url}/v1/models:? {words}", str(caught.value))


def test_the_model_of_several() -> None:
    with ScriptedServer(others=models("a", "b")) as server, started(server, core_options={"model": "b"}):
        assert server.asked()[-1]["model"] == "b"


def says(owner: str, version: object = None) -> dict[str, Callable[[Request], Reply]]:
    """What a server answers, cut to what says who it is."""
    card = {"id": MODEL, "object": "model", "created": 1795357545, "owned_by": owner, "root": MODEL}
    told: dict[str, Callable[[Request], Reply]] = {"/v1/models": lambda request: plain({"data": [card]})}
    return told if version is None else {**told, "/version": lambda request: plain(version)}


@pytest.mark.parametrize(
    ("told", "frameworks"),
    [
        (says("vllm", {"version": "0.32.0"}), ["vLLM 0.32.0"]),
        (says("mpillm", {"version": "0.1.0"}), ["mpillm 0.1.0"]),
        (says("tensorrt_llm"), ["TensorRT-LLM"]),
        (says("vllm", ["0.32"]), ["vLLM"]),
        (says("HuggingFaceTB", {"version": "1"}), []),  # who made the model, as transformers serve has it
        ({}, []),
    ],
)
def test_what_the_server_is(told: dict[str, Callable[[Request], Reply]], frameworks: list[str]) -> None:
    with ScriptedServer(others=told) as server, started(server) as core:
        assert core.frameworks() == frameworks


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"modle": "x"},
            "--core_options modle: this core has no such option .did you mean 'model'..; it has:"
            " model, retry_s",
        ),
        ({"retry_s": "soon"}, "--core_options retry_s:soon: expected a number"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words), core_of("localhost:1", core_options=options):
        pass


def test_stop_words_of_several_tokens() -> None:
    with (
        pytest.raises(ConfigError, match=r"--stop_words \[13, 13\]: a server takes"),
        core_of("localhost:1", stop_words=((13, 13),)),
    ):
        pass


# --- faults before the test ---


def test_dead_before_ready() -> None:
    """The address is taken, and nobody listens there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = f"^http://{address} was not ready within 2.7 s: Connection refused$"
        with core_of(address, "--load_deadline=3") as core, pytest.raises(RunError, match=words):
            core.load()


def test_slow_start() -> None:
    """It says so for a while, and is waited for."""
    answers = iter(["503 Service Unavailable"] * 3)
    health = {"/health": lambda request: plain({}, next(answers, "200 OK"))}
    with ScriptedServer(others=health) as server, core_of(server.address) as core:
        core.load()
        assert [request.path for request in server.requests] == ["/health"] * 4


def test_a_start_that_is_too_slow() -> None:
    health = {"/health": lambda request: plain({"error": "loading"}, "503 Service Unavailable")}
    with (
        ScriptedServer(others=health) as server,
        core_of(server.address, "--load_deadline=3") as core,
        pytest.raises(
            RunError, match=f"^{server.url} was not ready within 2.7 s: GET /health: HTTP 503: loading$"
        ),
    ):
        core.load()


def test_a_server_without_health() -> None:
    health = {"/health": lambda request: plain({}, "404 Not Found")}
    with ScriptedServer(others=health) as server, started(server):
        assert server.asked()


def test_a_wrong_key() -> None:
    health = {"/health": lambda request: plain({"error": {"message": "no key"}}, "401 Unauthorized")}
    with (
        ScriptedServer(others=health) as server,
        core_of(server.address) as core,
        pytest.raises(RunError, match=f"^{server.url}: GET /health: HTTP 401: no key; .*OPENAI_API_KEY"),
    ):
        core.load()


def test_a_server_that_answers_nothing_before_the_test() -> None:
    silent = {"/health": lambda request: Reply([], "hang")}
    with (
        ScriptedServer(others=silent) as server,
        core_of(server.address, "--load_deadline=3") as core,
        pytest.raises(
            RunError, match=f"^{server.url} was not ready within 2.7 s: no answer to GET /health within"
        ),
    ):
        core.load()


def test_a_server_that_refuses_everything() -> None:
    no = refuses("prompt", status="422 Unprocessable Entity")
    words = (
        "refused a request of one token in every form:\n  return_token_ids: HTTP 422: unknown field prompt\n"
    )
    with ScriptedServer(no) as server, pytest.raises(RunError, match=words), started(server):
        pass


# --- faults in the test: `then` comes once, for the first request of the test; what others get is good ---


def once(reply: Callable[[Request], Reply], times: int = 1) -> Callable[[Request], Reply]:
    """For the first requests behind the probe, `reply`; for the others a good answer."""
    left = itertools.count(-times)

    def answer(request: Request) -> Reply:
        return good(request) if request.json["max_tokens"] == 1 or next(left) >= 0 else reply(request)

    return answer


FIRST_TOKEN = chunk(event(choice([5], "t")))
FAULTS: dict[str, tuple[Reply, str]] = {
    "an event that is no JSON": (
        Reply([STREAM, FIRST_TOKEN, chunk(b'data: {"choices": [{"te\n\n')]),
        "it sent something that is not JSON",
    ),
    "a line that is no event": (
        Reply([STREAM, FIRST_TOKEN, chunk(b"HTTP/1.1 500 Internal Server Error\r\n\r\n")]),
        "it sent a line that is no server-sent event: b'HTTP/1.1 500",
    ),
    "JSON that is no completion": (
        Reply([STREAM, chunk(event([1]))]),
        "it sent JSON that is not a completion",
    ),
    "choices that are none": (
        Reply([STREAM, chunk(event({"choices": [7]}))]),
        "it sent JSON that is not a completion",
    ),
    "token ids that are none": (
        Reply([STREAM, chunk(event(choice("ab")))]),  # type: ignore[arg-type]
        "it sent JSON that is not a completion",
    ),
    "HTTP 500 in the middle of a stream": (
        Reply([STREAM, FIRST_TOKEN, head("500 Internal Server Error", Content_Length=0)]),
        "where the size of a chunk belongs",
    ),
    "an error in the middle of a stream": (
        Reply(
            [STREAM, FIRST_TOKEN, chunk(event({"error": {"message": "out of memory", "code": 500}})) + DONE]
        ),
        "it sent an error: out of memory",
    ),
    "TensorRT-LLM's error": (
        Reply(
            [
                STREAM,
                FIRST_TOKEN,
                chunk(event({"object": "error", "message": "no blocks", "code": 400})) + DONE,
            ]
        ),
        "it sent an error: no blocks",
    ),
    "a stream cut short": (
        Reply([STREAM, FIRST_TOKEN], "close"),
        "it closed the connection in the middle of the answer",
    ),
    "a stream that breaks": (
        Reply([STREAM, FIRST_TOKEN], "reset"),
        "(the connection broke|it closed the connection)",
    ),
    "a stream cut in a chunk": (
        Reply([STREAM, FIRST_TOKEN[:-5]], "close"),
        "it closed the connection in the middle of the answer",
    ),
    "a stream without an end": (
        Reply([STREAM, FIRST_TOKEN + DONE]),
        "it ended its answer in the middle: no finish_reason",
    ),
    "a body cut short": (
        Reply([head(Content_Length=500), b'{"choices"'], "close"),
        "it closed the connection in the middle of the answer",
    ),
    "no tokens": (
        Reply([STREAM + chunk(event(choice([], "", "stop"))) + DONE]),
        "it answered without a token: finish_reason stop",
    ),
    "no events": (Reply([STREAM + DONE]), "it ended its answer in the middle"),
    "an empty body": (Reply([head(Content_Length=0)]), "it ended its answer in the middle"),
    "an answer given up": (
        Reply([STREAM + chunk(event(choice([5], "t", "abort"))) + DONE]),
        "it gave up the answer: finish_reason abort",
    ),
    "HTTP 500": (
        plain({"error": {"message": "it broke"}}, "500 Internal Server Error"),
        "HTTP 500: it broke$",
    ),
    "HTTP 404": (plain({"detail": "no such model"}, "404 Not Found"), "HTTP 404: no such model$"),
    "what is no HTTP": (
        Reply([b"220 mail.example.org ESMTP\r\n\r\n"]),
        "it sent something that is not HTTP: '220 mai",
    ),
    "a chunk without a size": (Reply([STREAM, b"hello" * 1000]), "it sent a chunk without a size"),
    "a chunk of a wrong size": (
        Reply([STREAM, b"3\r\nabcdef\r\n"]),
        "it sent a chunk that is longer than it says",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    """One message with the address and the cause; no request is sent twice.

    What was answered was answered once.
    """
    reply, words = FAULTS[name]
    with ScriptedServer(once(lambda request: reply)) as server, started(server, SERVER) as core:
        probes = len(server.asked())
        core.enqueue(requests())
        assert re.match(f"{server.url}/v1/completions: .*{words}", failure(core))
        prompts = [tuple(asked["prompt"]) for asked in server.asked()[probes:]]
        assert len(prompts) == len(set(prompts)), "what may have begun is not sent again"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_server_that_accepts_and_never_answers(streamed: bool) -> None:
    scenario = SERVER if streamed else "--scenarios=Offline"
    with (
        ScriptedServer(once(lambda request: Reply([], "hang"), 99)) as server,
        started(server, scenario, "--stall_timeout=1") as core,
    ):
        core.enqueue(requests())
        assert (
            failure(core) == f"{server.url}/v1/completions: it has said nothing for 0.9 s, and owes 4 answers"
        )


def test_a_server_that_stops_in_the_middle_and_stays_connected() -> None:
    half = once(lambda request: Reply([STREAM, FIRST_TOKEN], "hang"), 99)
    with ScriptedServer(half) as server, started(server, SERVER, "--stall_timeout=1") as core:
        core.enqueue(requests([[1]]))
        assert (
            failure(core) == f"{server.url}/v1/completions: it has said nothing for 0.9 s, and owes 1 answers"
        )


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_that_hangs_while_others_are_answered(begun: bool) -> None:
    """Begun or not. The server never falls silent: new requests come, and are answered."""

    def completions(request: Request) -> Reply:
        if request.json["prompt"] == [1, 2]:
            return Reply([STREAM, FIRST_TOKEN] if begun else [], "hang")
        return good(request)

    with ScriptedServer(completions) as server, started(server, SERVER, "--stall_timeout=1") as core:
        core.enqueue(requests([[1, 2]]))
        rows, asked = Rows(core), 0

        def ask_on() -> bool:
            nonlocal asked
            if len(rows.poll()) == asked:
                asked += 1
                core.enqueue(requests([[5]], id=100 + asked))
            return False

        with pytest.raises(RunError) as caught:
            wait_until(ask_on, "a failure")
    who, what = (
        f"{server.url}/v1/completions: the request with the prompt [1, 2] (2 tokens)",
        "has got nothing",
    )
    came = f"answered before: {int(begun)} of its tokens"
    assert caught.value.failures[0].cause == f"{who} {what} for 0.9 s, while others were answered; {came}"


def test_a_request_that_waits_for_its_turn_does_not_hang() -> None:
    endpoint, listener = Endpoint("host:1"), cast(Listener, None)
    client = Client([endpoint], listener, str, stream=True, silence_s=10, retry_s=0)
    call = Call(client, 1, [5], cast(Sampling, None))
    assert not client._hangs(call, 1000.0), "it is not sent yet"
    call.endpoint, call.sent_at, call.heard_at = endpoint, 100.0, 100.0
    assert not client._hangs(call, 1000.0), "it is to be sent again"
    endpoint.calls.add(call)
    endpoint.answered = 109.0
    assert not client._hangs(call, 1000.0), "of all that were sent 10 s later none is answered yet"
    endpoint.answered = 111.0
    assert client._hangs(call, 1000.0)
    assert not client._hangs(call, 109.0)
    call.heard_at = 995.0
    assert not client._hangs(call, 1000.0)


def test_dead_in_the_test() -> None:
    with (
        ScriptedServer(once(lambda request: Reply([], "stop"))) as server,
        started(server, core_options={"retry_s": 0.5}) as core,
    ):
        core.enqueue(requests())
        assert re.match(
            f"{server.url}/v1/completions: Connection refused; retried [1-9] times, for at most 0.5 s",
            failure(core),
        )


# --- what is safe to send again ---


@pytest.mark.parametrize(
    "reply",
    [
        plain({"error": "busy"}, "429 Too Many Requests", Retry_After=0),
        plain({"error": "busy"}, "429 Too Many Requests", Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
        plain({"error": "busy"}, "503 Service Unavailable", Retry_After="soon"),
        Reply([], "close"),
        Reply([], "reset"),
    ],
    ids=["429", "429 with a date", "503", "closed", "reset"],
)
def test_what_is_sent_again(reply: Reply) -> None:
    """Nothing of an answer had come. Each answer comes once, and every attempt is counted."""
    with ScriptedServer(once(lambda request: reply, 3)) as server, started(server, SERVER) as core:
        probes = len(server.asked())
        core.enqueue(requests())
        ended = [row for row in Rows(core).until(4) if row[1] & FINAL]
        assert sorted((row[0], row[2]) for row in ended) == [
            (10 + i, answer_of(prompt, 4)) for i, prompt in enumerate(PROMPTS)
        ]
        assert core.statistics()["retries"] == 3
        assert len(server.asked()) - probes == 7


def test_a_retry_after_that_is_too_long() -> None:
    busy = plain({"error": "busy"}, "429 Too Many Requests", Retry_After=3600)
    with ScriptedServer(once(lambda request: busy, 99)) as server, started(server) as core:
        core.enqueue(requests([[1]]))
        words = "HTTP 429: busy, it asks to wait 3600 s; retried 0 times, for at most 10 s"
        assert failure(core) == f"{server.url}/v1/completions: {words}"


def test_a_request_that_waits_is_cancelled() -> None:
    busy = plain({"error": "busy"}, "429 Too Many Requests", Retry_After=5)
    with ScriptedServer(once(lambda request: busy, 99)) as server, started(server) as core:
        probes = len(server.asked())
        core.enqueue(requests([[1]]))
        wait_until(lambda: core.statistics()["retries"], "a retry")
        core.cancel([10])
        assert Rows(core).until(1) == [(10, FINAL | CANCELLED, [])]
        assert len(server.asked()) == probes + 1


def test_another_server_takes_over() -> None:
    """What one server did not begin, another one does."""
    refusing = once(lambda request: plain({}, "503 Service Unavailable", Retry_After=0), 10**6)
    with (
        ScriptedServer(refusing) as one,
        ScriptedServer() as other,
        core_of(f"{one.address},{other.address}") as core,
    ):
        core.load()
        core.run_health_check()
        core.enqueue(requests([[i] for i in range(1, 11)]))
        rows = Rows(core).until(10)
        assert sorted(row[2] for row in rows) == [answer_of([i], 4) for i in range(1, 11)]
        assert core.statistics()["retries"] > 0


def test_a_core_that_was_never_loaded_stops() -> None:
    with core_of("localhost:1") as core:
        assert isinstance(core, TrtllmEndpointCore)
        assert not core.has_work()
