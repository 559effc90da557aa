"""``python -m tests.helpers.small_vllm serve MODEL …``: a context or generation server as vLLM's are.

It speaks `kv_transfer_params`. What the other can't do without, a prompt's sum, goes by its side channel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import threading
import time
from typing import Any

from tests.helpers.scripted_server import Reply, Request, ScriptedServer, good, plain

_FIELDS = {"do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids"}
_FIELDS |= {"remote_host", "remote_port"}
ENDS_AT_ONCE = 7  # prompts of a multiple of so many tokens: their first token is the last one


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs=2)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-transfer-config", type=json.loads, required=True)
    parser.add_argument("--pause-s", type=float, default=0.0, help="before each answer")
    parser.add_argument("--loses", action="store_true", help="it computes prompts again")
    parser.add_argument("--hides", action="store_true", help="it answers without kv_transfer_params")
    options, _ = parser.parse_known_args()
    halves: dict[str, type[_Context | _Generation]] = {"kv_producer": _Context, "kv_consumer": _Generation}
    half = halves[options.kv_transfer_config["kv_role"]](options)

    def answer(request: Request) -> Reply:
        time.sleep(options.pause_s)
        body = request.json
        if body["max_tokens"] == 1 and "kv_transfer_params" not in body:
            return good(request)  # a health check
        return half.answer(request, body)

    models = {"data": [{"id": options.served_model_name, "owned_by": "vllm"}]}
    others = {
        "/v1/models": lambda request: plain(models),
        "/version": lambda request: plain({"version": "0.0"}),
        "/metrics": lambda request: _text(half.metrics()),
    }
    with ScriptedServer(answer, others, port=options.port):
        time.sleep(600)


def _text(text: str) -> Reply:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n"
    return Reply([head.encode() + text.encode()])


def _refuse(why: str) -> Reply:
    print(why, flush=True)
    return plain({"error": {"message": why}}, "400 Bad Request")


class _Context:
    """Keeps the sums of prompts until they are fetched, once each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._hides = options.hides
        self._sums: dict[str, int] = {}
        self._ids = itertools.count(1)
        self._n_prompts = self._n_tokens = 0
        self._host = os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
        self._port = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        listener = socket.create_server((self._host, self._port), backlog=512)
        threading.Thread(target=self._hands_off, args=(listener,), daemon=True).start()

    def answer(self, request: Request, body: dict[str, Any]) -> Reply:
        params = body.get("kv_transfer_params") or {}
        if body["max_tokens"] != 1 or body.get("stream") or params.get("do_remote_decode") is not True:
            return _refuse("a context server is asked for one token, and to hand over")
        if _FIELDS - params.keys() or params["do_remote_prefill"] is not False:
            return _refuse(f"not as vLLM wants it: {params}")
        self._n_prompts += 1
        self._n_tokens += len(body["prompt"])
        made = json.loads(next(iter(good(request).pieces)).partition(b"\r\n\r\n")[2])
        if len(body["prompt"]) % ENDS_AT_ONCE == 0:
            made["choices"][0]["finish_reason"] = "stop"
        elif not self._hides:
            key = f"cmpl-{next(self._ids)}"
            self._sums[key] = sum(body["prompt"])
            at = {"remote_host": self._host, "remote_port": self._port}
            kept = {"remote_engine_id": str(os.getpid()), "remote_block_ids": [[1, 2]]}
            kept["remote_request_id"] = key
            made["kv_transfer_params"] = {"do_remote_prefill": True, "do_remote_decode": False, **kept, **at}
        return plain(made)

    def _hands_off(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as file:
                file.write(f"{self._sums.pop(file.readline().strip(), '')}\n")

    def metrics(self) -> str:
        return (
            f"vllm:prompt_tokens_total {self._n_tokens}\n"
            f"vllm:generation_tokens_total {self._n_prompts}\n"
            "vllm:nixl_num_kv_expired_reqs_total 0\n"
        )


class _Generation:
    """Answers by the sum that it has fetched; without `kv_transfer_params` not at all."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._loses = options.loses
        self._lock = threading.Lock()
        self._n = dict.fromkeys(("fetched", "failed", "prompts", "tokens"), 0)

    def answer(self, request: Request, body: dict[str, Any]) -> Reply:
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill") is not True or not params.get("remote_block_ids"):
            return _refuse("a generation server is asked without kv_transfer_params")
        if self._loses:
            self._count(failed=1)
        else:
            where = params["remote_host"], params["remote_port"]
            with socket.create_connection(where) as connection, connection.makefile("rw") as file:
                print(params["remote_request_id"], file=file, flush=True)
                total = file.readline().strip()
            if total != str(sum(body["prompt"])):
                return _refuse(f"{params['remote_request_id']}: {total!r} is not what its prompt makes")
            self._count(fetched=1)
        self._count(prompts=len(body["prompt"]), tokens=body["max_tokens"])
        return good(request)

    def _count(self, **by: int) -> None:
        with self._lock:
            for name, n in by.items():
                self._n[name] += n

    def metrics(self) -> str:
        return (
            f"vllm:nixl_xfer_time_seconds_count {self._n['fetched']}\n"
            f"vllm:nixl_num_failed_transfers_total {self._n['failed']}\n"
            f"vllm:prompt_tokens_total {self._n['prompts']}\n"
            f"vllm:generation_tokens_total {self._n['tokens']}\n"
        )


if __name__ == "__main__":
    main()
