"""A server that is honest but for one lie: each is one that the checks of a test name."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from mpillm.cores.base import LLMCore
from mpillm.cores.capabilities import FindsServers
from tests.helpers.endpoint_cores import PROMPTS, Rows, core_of, requests
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
    head,
    plain,
)

OTHER_MODEL = "another-model"
END = 2  # the token that ends an answer

# What an honest server counts, under vLLM's names.
NAMES = {
    "prompt": "vllm:prompt_tokens_total",
    "generated": "vllm:generation_tokens_total",
    "cached": "vllm:prefix_cache_hits_total",
    "guessed": "vllm:spec_decode_num_accepted_tokens_total",
    "transfers": "vllm:nixl_xfer_time_seconds_count",
    "failed": "vllm:nixl_num_failed_transfers_total",
    "received": 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}',
    "computed": 'vllm:prompt_tokens_by_source_total{source="local_compute"}',
    "expired": "vllm:nixl_num_kv_expired_reqs_total",
    "late": "vllm:nixl_num_notifications_after_expiry_total",
}
Counts = dict[str, int]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Lie:
    """One difference from an honest server."""

    answer: Callable[[Answer, Request], Any] = lambda answer, request: answer  # from an honest answer
    tokens: Callable[[list[int], Mapping[str, Any]], list[int]] = lambda tokens, body: tokens
    reason: str | None = "length"
    counts: Counts = field(default_factory=dict)  # that grow by so much more with each answer
    hidden: tuple[str, ...] = ()  # counts that are not on its page
    models: tuple[str, ...] = (MODEL,)
    status: str = "200 OK"
    headers: Mapping[str, str] = field(default_factory=dict)
    metrics: bool = True
    again: bool = False  # every answer comes twice
    cut: bool = False  # the body ends early


HONEST = Lie()


class LyingServer:
    """A vLLM server, which also computes contexts for others, and receives them."""

    def __init__(self, lie: Lie) -> None:
        self.lie = lie
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._ids = itertools.count()
        pages: dict[str, Callable[[Request], Reply]] = {
            "/v1/models": lambda _: plain({"data": [{"id": name} for name in lie.models]}),
            "/metrics": self._metrics,
        }
        self.http = ScriptedServer(self._answer, pages)

    def _metrics(self, _: Request) -> Reply:
        if not self.lie.metrics:
            return plain({}, "404 Not Found")
        visible = [name for name in NAMES if name not in self.lie.hidden]
        with self._lock:
            body = "".join(f"{NAMES[name]} {self._counts[name]}\n" for name in visible).encode()
        return Reply([head(Content_Length=len(body)) + body])

    def _answer(self, request: Request) -> Reply:
        received, lie = request.json, self.lie
        params = received.get("kv_transfer_params") or {}
        tokens = answer_of(received["prompt"], received["max_tokens"])
        if not (health := received["max_tokens"] == 1 and not params):
            tokens = lie.tokens(tokens, received)
        usage = {"prompt_tokens": len(received["prompt"]), "completion_tokens": len(tokens)}
        made: Any = {"model": received["model"], **choice(tokens, "t", lie.reason), "usage": usage}
        if params.get("do_remote_decode"):
            made["kv_transfer_params"] = {"do_remote_prefill": True, "remote_block_ids": [next(self._ids)]}
        self._count(len(received["prompt"]), len(tokens), arrived=bool(params.get("do_remote_prefill")))
        if not health:
            made = lie.answer(made, request)
            with self._lock:
                self._counts.update(lie.counts)
        if received.get("stream"):
            return Reply([STREAM, chunk(event(made)), DONE])
        body = made if isinstance(made, bytes) else json.dumps(made).encode()
        status = "200 OK" if health else lie.status
        whole = head(status, Content_Length=len(body) + 9 * lie.cut * (not health), **lie.headers) + body
        return Reply([whole * (2 if lie.again and not health else 1)], "close" if lie.cut else "keep")

    def _count(self, n_prompt: int, n_tokens: int, arrived: bool) -> None:
        with self._lock:
            self._counts.update(prompt=n_prompt, generated=n_tokens, transfers=int(arrived))
            self._counts.update(received=n_prompt - 1 if arrived else 0, computed=1 if arrived else n_prompt)


@contextmanager
def core_of_liars(lies: Mapping[str, Lie], *options: str) -> Iterator[tuple[LLMCore, dict[str, str]]]:
    """Yield a core that is ready to use these servers, and their URLs, both by role.

    Role "": a server of somebody else; "owned": of the run; "context" and "generation": both of the run.
    """
    with ExitStack() as stack:
        servers = {role: stack.enter_context(LyingServer(lie).http) for role, lie in lies.items()}
        urls = {role: server.url for role, server in servers.items()}
        if "" in urls:
            core = stack.enter_context(core_of(servers[""].address, *options))
            core.load()
        else:
            context = {"context_servers": (1,), "protocol": "kv_transfer_params"} if "context" in urls else {}
            more: dict[str, Any] = {"server": 0, "names_model": True, **context}
            core = stack.enter_context(core_of("none:1", f"--model_path={MODEL}", *options, **more))
            assert isinstance(core, FindsServers)
            core.find_servers({0: urls.get("owned") or urls["generation"], 1: urls.get("context", "")})
        yield core, urls


def result_of(core: LLMCore, **fields: Any) -> dict[str, Any]:
    """Return the result of a test of a core, as far as its servers' checks read it."""
    core.run_health_check()
    core.start_test()
    core.enqueue(requests(**fields))
    Rows(core).until(len(PROMPTS))
    core.flush()
    return {"per_instance": [{"samples": len(PROMPTS), **core.statistics()}]}
