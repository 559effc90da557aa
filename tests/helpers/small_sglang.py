"""``python -m tests.helpers.small_sglang serve …``: a context or generation server as SGLang's are.

A fake: SGLang takes minutes to load, and needs its own environment and Mooncake (tests/peers/test_sglang.py).
As there, both servers must hold the same request simultaneously. The generation server fetches a prompt's
sum, without which it cannot answer, from the context server's bootstrap port, by the room of the request.
Either of them gives up after `wait_s`.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import closing
from typing import Any

from tests.helpers.ports import free_port
from tests.helpers.scripted_server import Reply, Request, ScriptedServer, choice, good, head, plain

ALONE = "2.2.2.2"  # the host in requests that transfer nothing
FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def error(why: str, status: str) -> Reply:
    """Reply as SGLang: `ErrorResponse` of its OpenAI API."""
    return plain({"object": "error", "message": why, "code": int(status.split()[0])}, status)


def text_page(text: str) -> Reply:
    return Reply([head(Content_Length=len(text)) + text.encode()])


class Server(ABC):
    """What both have in common: the checks of a request, and counts."""

    mode = ""

    def __init__(self, wait_s: float, name: str = "scripted", port: int | None = None) -> None:
        self.wait_s = wait_s
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.bootstrap_port = 8998  # its default, where no generation server listens
        pages = {
            "/v1/models": lambda _: plain({"data": [{"id": name, "owned_by": "sglang"}]}),
            "/server_info": lambda _: plain(self.info()),
            "/metrics": lambda _: text_page(self.metrics()),
        }
        self.http = ScriptedServer(self.answer, pages, port=free_port() if port is None else port)

    def info(self) -> dict[str, Any]:
        ports = {"disaggregation_bootstrap_port": self.bootstrap_port}
        return {"version": "0.0", "disaggregation_mode": self.mode, **ports}

    def answer(self, request: Request) -> Reply:
        body = request.json
        if body.get("bootstrap_room") is None:
            return error("Disaggregated request received without bootstrap room id", "400 Bad Request")
        if body["bootstrap_host"] == ALONE:
            return good(request)
        if missing := [name for name in FIELDS if not body.get(name)]:
            return error(f"no {missing[0]}", "400 Bad Request")
        return self.answer_pair(request, body)

    @abstractmethod
    def answer_pair(self, request: Request, body: dict[str, Any]) -> Reply:
        """Answer one half of a request."""

    def count(self, prompt: int, generated: int) -> None:
        with self.lock:
            self.counts.update(prompt_tokens_total=prompt, generation_tokens_total=generated)
            self.counts.update(num_requests_total=1)

    def metrics(self) -> str:
        """As SGLang: without the counts that are 0."""
        with self.lock:
            rows = [f'sglang:{name}{{engine_type="{self.mode}"}} {n}.0' for name, n in self.counts.items()]
        return "\n".join([f'sglang:num_running_reqs{{engine_type="{self.mode}"}} 0.0', *rows, ""])


class _Room:
    def __init__(self) -> None:
        self.sum: int | None = None
        self.is_computed, self.is_fetched = threading.Event(), threading.Event()


class ContextServer(Server):
    mode = "prefill"

    def __init__(self, *args: Any, bootstrap_port: int = 0, **more: Any) -> None:
        super().__init__(*args, **more)
        self._rooms: dict[int, _Room] = {}
        listener = socket.create_server(("127.0.0.1", bootstrap_port), backlog=512)
        self.bootstrap_port = listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _room(self, number: int) -> _Room:
        with self.lock:
            return self._rooms.setdefault(number, _Room())

    def answer_pair(self, request: Request, body: dict[str, Any]) -> Reply:
        if body.get("stream"):
            return error("a router does not stream from here", "400 Bad Request")
        number = body["bootstrap_room"]
        room = self._room(number)
        room.sum = sum(body["prompt"])
        room.is_computed.set()
        if not self._comes(room.is_fetched):
            with self.lock:
                self.counts["num_transfer_failed_reqs_total"] += 1
            return error(
                f"Prefill transfer failed for request req.bootstrap_room={number}", "500 Internal Error"
            )
        with self.lock:
            self.counts["kv_transfer_latency_ms_count"] += 1
        self.count(len(body["prompt"]), 1)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}
        return plain({**choice([room.sum], "t", "length"), "usage": usage})

    def _comes(self, event: threading.Event) -> bool:
        """Wait for the other server, but no longer than this one runs."""
        end = time.monotonic() + self.wait_s
        while not (event.wait(0.05) or self.http.is_stopped or time.monotonic() > end):
            pass
        return event.is_set()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._transfer, args=(connection,), daemon=True).start()

    def _transfer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as file:
            room = self._room(int(file.readline()))
            if self._comes(room.is_computed):
                print(room.sum, file=file, flush=True)
                room.is_fetched.set()


class GenerationServer(Server):
    mode = "decode"

    def answer_pair(self, request: Request, body: dict[str, Any]) -> Reply:
        where = body["bootstrap_host"], body["bootstrap_port"]
        with closing(socket.create_connection(where)) as connection, connection.makefile("rw") as file:
            print(body["bootstrap_room"], file=file, flush=True)
            fetched = file.readline().strip()
        if fetched != str(sum(body["prompt"])):
            with self.lock:
                self.counts["num_transfer_failed_reqs_total"] += 1
            return error(f"Decode transfer failed: {fetched!r} is not of this prompt", "500 Internal Error")
        self.count(len(body["prompt"]), body["max_tokens"])
        return good(request)


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--disaggregation-mode", choices=["prefill", "decode"], required=True)
    parser.add_argument("--disaggregation-bootstrap-port", type=int)
    parser.add_argument("--wait-s", type=float, default=30.0, help="for the other server")
    parser.add_argument("--pause-s", type=float, default=0.0, help="before each answer")
    parser.add_argument("--loses", action="store_true", help="the context server fails in the test")
    options, _ = parser.parse_known_args()
    more: dict[str, Any] = {"name": options.served_model_name, "port": options.port}
    server: Server
    if options.disaggregation_mode == "prefill":
        server = ContextServer(options.wait_s, bootstrap_port=options.disaggregation_bootstrap_port, **more)
    else:
        server = GenerationServer(options.wait_s, **more)

    def answer(request: Request) -> Reply:
        time.sleep(options.pause_s)
        if options.loses and server.mode == "prefill" and request.json["max_tokens"] > 1:
            return error("Prefill transfer failed", "500 Internal Server Error")
        return server.answer(request)

    server.http.completions = answer
    with server.http:
        time.sleep(600)


if __name__ == "__main__":
    main()
