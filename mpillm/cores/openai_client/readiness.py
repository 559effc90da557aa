"""Before a test: wait until a server is up, find its model, and determine its dialect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from disagg.errors import nearest
from mpillm.comms.messages import WAITING
from mpillm.cores.openai_client.answer import AnswerError, failure_text, is_page
from mpillm.cores.openai_client.dialect import (
    COMPLETIONS,
    DIALECTS,
    MESSAGE_DIALECTS,
    RESPONSES,
    TEXT_DIALECTS,
    Dialect,
    Sampling,
    body,
    remedy_without_usage,
)
from mpillm.cores.openai_client.endpoint import API_KEY, EndpointError, RemoteServer, UntrustedError
from mpillm.cores.openai_client.http_connection import HttpError, NoAnswer, NothingSentBack
from mpillm.cores.openai_client.responses_answer import answer_at
from mpillm.data.chat_request import chat_prompt, responses_prompt

_log = logging.getLogger(__name__)
_PAUSE_S = 0.2
_FIRST_LOG_S, _LOG_S = 2.0, 10.0
_FETCH_S = 10.0  # longest wait for one answer of a server that may not be up
_REFUSES_S = 3.0  # patience with a server that refuses: a proxy may detect the server late
_LOADS_S = 27.0  # minimum patience with a server that answers with its own errors (HTTP 5xx)
_BUSY_S = {429: _REFUSES_S, 503: _LOADS_S}  # patience with a server that does not begin a request yet
_KEY = (401, 403)
_NO_SUCH_PATH = (404, 405)
_NO_PATH = "; its API lists models, but does not take requests there: see --endpoint_type"
# `owned_by` in the list of models, by server.
_FRAMEWORKS = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM", "mpillm": "mpillm"}
_STREAM = next(one for one in TEXT_DIALECTS if not one.options)  # its streams request usage
_PROBE = "Hello"
_PROBE_IDS = [3] * 8  # ids that every model has
_PROBE_CHAT = chat_prompt([{"role": "user", "content": _PROBE}])
_PROBE_INPUT = responses_prompt([{"role": "user", "content": _PROBE}])


class ServerStarts(Protocol):
    """Reports about servers outside the run that do not answer yet."""

    def failures(self) -> str:
        """Return which servers failed to start, and why; "" if none is known."""

    def wait_s(self, default_s: float) -> float:
        """Return how long a client waits for these servers."""


class _UnknownStarts:
    def failures(self) -> str:
        return ""

    def wait_s(self, default_s: float) -> float:
        return default_s


UNKNOWN_STARTS = _UnknownStarts()


async def until_ready(
    endpoint: RemoteServer,
    deadline_s: float,
    report_wait: Callable[[str], None] = lambda text: None,
    began: float | None = None,
    longer: str = "",
    starts: ServerStarts = UNKNOWN_STARTS,
) -> None:
    """Wait until the server is healthy (`/health`, else `/v1/models`); report obstacles with `report_wait`.

    A server that refuses requests (HTTP 4xx) is up: the wait ends within 3 s. A server that answers HTTP 5xx
    may be loading: it has half of the deadline, but at least 27 s. `longer`: the option that extends the
    deadline. `starts`: if it reports a failure, the wait ends.

    Raises EndpointError `deadline_s` after `began` (time.monotonic); None: after the call.
    """
    default_s = deadline_s
    start = time.monotonic() if began is None else began
    logged = time.monotonic() - _LOG_S + _FIRST_LOG_S
    option = f" ({longer})" if longer else ""
    last, answering_since = "", math.inf
    report_wait(f"{WAITING}{endpoint.url}")
    while True:
        deadline_s = starts.wait_s(default_s)
        left = start + deadline_s - time.monotonic()
        if left <= 0:
            why = last or "no request was sent"
            raise EndpointError(f"{endpoint.url} was not ready within {deadline_s:g} s{option}: {why}")
        patience_s = math.inf  # without an answer, only the deadline ends the wait
        try:
            answer = await _health(endpoint, min(left, _FETCH_S))
            if answer is None:
                return
            status, last = answer
            patience_s = _patience_s(status, deadline_s)
        except UntrustedError as error:
            raise EndpointError(f"{endpoint.url}: {error}") from None
        except (NothingSentBack, NoAnswer) as error:
            # The error of an attempt that the deadline cuts short is less useful than the result before it.
            if not last or time.monotonic() < start + deadline_s - _PAUSE_S:
                last = str(error)
        except HttpError as error:
            last, patience_s = f"{error}; name the port of its HTTP API", _REFUSES_S
        now = time.monotonic()
        answering_since = min(answering_since, now) if patience_s < math.inf else math.inf
        if now - answering_since >= patience_s:
            lasted = f" was not ready within {patience_s:g} s{option}" if patience_s > _REFUSES_S else ""
            raise EndpointError(f"{endpoint.url}{lasted}: {last}")
        if starts.failures():
            raise EndpointError(f"{endpoint.url}: {last}")
        waiting = f"{WAITING}{endpoint.url}: {last}"
        report_wait(waiting)
        if now - logged > _LOG_S:
            logged = now
            _log.warning("%s", waiting)
        await asyncio.sleep(min(_PAUSE_S, left))


async def _health(endpoint: RemoteServer, timeout_s: float) -> tuple[int, str] | None:
    """Return the status of an unhealthy server, with the reason in words; None: it is healthy.

    Raises HttpError.
    """
    refusals = []
    for path in ("/health", "/v1/models"):
        status, headers, reply = await endpoint.fetch("GET", path, timeout_s)
        if status == 200:
            return None
        refusals.append(f"GET {path}: {failure_text(status, reply, headers.get('location'))}")
        if status not in _NO_SUCH_PATH:
            break
    return status, "; ".join(refusals) + _advice(status, endpoint)


def _patience_s(status: int, deadline_s: float) -> float:
    """Return the longest time for which a server may answer with this status before a test."""
    if status in _KEY or 300 <= status < 400:
        return 0.0
    return _REFUSES_S if status < 500 else max(_LOADS_S, deadline_s / 2)


def _advice(status: int, endpoint: RemoteServer) -> str:
    """Return the likely cause of a refusal, for the end of its text."""
    if status in _KEY:
        none = f"no key was sent: set the environment variable {API_KEY} for all ranks"
        return f"; the sent key is from {endpoint.key_source}" if endpoint.key_source else f"; {none}"
    if status in _NO_SUCH_PATH:
        return f"; the server is up: if its API has a path, add it to the URL, as in {endpoint.url}/PATH"
    if status == 429:
        return "; it refuses every request: a rate limit, or the load of others"
    return ""


async def find_model(
    endpoint: RemoteServer,
    model: str | None,
    model_path: str | None,
    timeout_s: float,
    *,
    strict: bool = False,
) -> str:
    """Return the model's name at this server: `model`, or the match of `model_path`, or the only model.

    `strict`: the run has started the server with `model_path`, so another model is an error.
    """
    where = f"{endpoint.url}/v1/models"
    try:
        status, headers, reply = await endpoint.fetch("GET", "/v1/models", min(timeout_s, _FETCH_S))
        names = [model["id"] for model in json.loads(reply)["data"]] if status == 200 else []
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a model's id is a text")
    except HttpError as error:
        raise EndpointError(f"{where}: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        content = "an HTML page; name the URL of the API" if is_page(reply) else repr(reply[:80])
        raise EndpointError(f"{where}: it sent something that is not a list of models: {content}") from None
    if status in _KEY:
        refusal = failure_text(status, reply, headers.get("location"))
        raise EndpointError(f"{where}: {refusal}{_advice(status, endpoint)}")
    if model is None and model_path is not None:
        candidates = (model_path, str(Path(model_path).resolve()), Path(model_path).name)
        model = next((name for name in candidates if name in names), None)
        if model is None and not names:
            model = model_path
    if model is None:
        if strict and model_path is not None:
            raise EndpointError(
                f"{where} lists {_listed(names)}, not {Path(model_path).name}, which the run started;"
                " to accept it, name the model with --core_options model:NAME"
            )
        if len(names) == 1:
            return str(names[0])
        if status != 200:
            refusal = failure_text(status, reply, headers.get("location"))
            raise EndpointError(f"{where}: {refusal}: name the model with --core_options model:NAME")
        raise EndpointError(f"{where} lists {_listed(names)}: name one with --core_options model:NAME")
    if names and model not in names:
        raise EndpointError(
            f"{where}: it has no model {model}{nearest(model, names)}; it has {_listed(names)}"
        )
    return model


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "no model"


async def framework_of(endpoint: RemoteServer, timeout_s: float) -> str | None:
    """Return the server's name and version; None if it does not report its name.

    The name is `owned_by` of its models, if known. The version is from `/version`, or `/server_info` of
    SGLang.
    """
    models = await _fetch_object(endpoint, "/v1/models", timeout_s)
    try:
        (owner,) = {model["owned_by"] for model in models["data"]}
        name = _FRAMEWORKS[owner]
    except (KeyError, TypeError, ValueError):
        return None
    version = await _fetch_object(endpoint, "/server_info" if owner == "sglang" else "/version", timeout_s)
    number = version.get("version")
    return f"{name} {number}" if isinstance(number, str) else name


async def bootstrap_port_of(endpoint: RemoteServer, timeout_s: float) -> int:
    """Return the port where generation servers find SGLang's context server. Raises EndpointError."""
    info = await _fetch_object(endpoint, "/server_info", timeout_s)
    mode, port = info.get("disaggregation_mode"), info.get("disaggregation_bootstrap_port")
    if mode != "prefill" or type(port) is not int or not 0 < port < 1 << 16:
        raise EndpointError(
            f"{endpoint.url}/server_info: disaggregation_mode {str(mode)[:30]}, disaggregation_bootstrap_port"
            f" {str(port)[:30]}; expected prefill and a port: remove both options from --server_args"
        )
    return port


async def _fetch_object(endpoint: RemoteServer, path: str, timeout_s: float) -> dict[str, Any]:
    try:
        status, _, reply = await endpoint.fetch("GET", path, min(timeout_s, _FETCH_S))
        content = json.loads(reply) if status == 200 else None
    except (HttpError, ValueError, RecursionError) as error:
        _log.info("%s%s: %s", endpoint.url, path, error)
        return {}
    return content if isinstance(content, dict) else {}


async def choose_dialect(
    endpoint: RemoteServer,
    has_tokenizer: bool,
    timeout_s: float,
    longer: str = "",
    *,
    texts: bool = False,
    path: str = COMPLETIONS,
    stream: bool = False,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Request a token in each dialect; set `endpoint.dialect` to the first that works. Raises EndpointError.

    `has_tokenizer`: there is a tokenizer here, to convert between text and tokens. `longer`: the option that
    extends the deadline. `texts`: prompts are texts, and the server must count tokens. `path`: that of the
    requests, in OpenAI's API. `stream`: the server must also count the tokens of streams. `more`: fields of
    these requests.
    """
    dialects = MESSAGE_DIALECTS.get(path, TEXT_DIALECTS if texts else DIALECTS)
    end, where = time.monotonic() + timeout_s, f"{endpoint.url}{endpoint.path_of(path)}"
    refusals: list[str] = []
    for dialect in dialects:
        status, reply = await _probed(endpoint, dialect, end, longer, more, stream=False)
        if status == 200:
            try:
                (answer := answer_at(path, False, 1)).feed(reply, 0.0)
                answer.finish(0.0)
            except (AnswerError, ValueError) as error:
                if dialect is not dialects[-1] and not answer.finish_reason:
                    raise EndpointError(f"{where}: {error}") from None
                if not answer.completion_tokens:
                    raise EndpointError(f"{where}: {error}") from None
            if dialect.token_ids and not answer.tokens:
                continue  # the server has ignored an unknown field
            if texts and not dialect.token_ids:
                if answer.completion_tokens and (
                    not stream or await _counts(endpoint, dialect, end, longer, more)
                ):
                    endpoint.dialect = dialect
                    return
                refusals.append(f"{dialect.name}: no usage, which has the number of tokens")
                continue
            if not dialect.token_ids and not has_tokenizer:
                raise EndpointError(
                    f"{where} gives no token ids: name the folder of its tokenizer with --model_path"
                )
            endpoint.dialect = dialect
            return
        refusals.append(f"{dialect.name}: {failure_text(status, reply)}")
    if any("no usage" in refusal for refusal in refusals):
        raise EndpointError(
            f"{where} sends neither token ids nor usage, so answers cannot be counted:"
            f" {remedy_without_usage(path)}"
        )
    raise EndpointError("\n  ".join([f"{where} refused a request of one token in every form:", *refusals]))


def _probe(endpoint: RemoteServer, dialect: Dialect, more: Mapping[str, Any], *, stream: bool) -> bytes:
    prompt: str | list[int] = _PROBE_IDS if dialect.token_prompts else _PROBE
    if dialect.sends_messages:
        prompt = _PROBE_INPUT if dialect.path == RESPONSES else _PROBE_CHAT
    return body(dialect, endpoint.model, prompt, Sampling(max_tokens=1, extra=more), stream)


async def _probed(
    endpoint: RemoteServer,
    dialect: Dialect,
    end: float,
    longer: str,
    more: Mapping[str, Any],
    *,
    stream: bool,
) -> tuple[int, bytes]:
    """Return the status and body of the response to a request of one token; wait for a busy server.

    Raises EndpointError if there is none until `end`, or for a status that does not depend on the dialect.
    """
    request = _probe(endpoint, dialect, more, stream=stream)
    start, where = time.monotonic(), f"{endpoint.url}{endpoint.path_of(dialect.path)}"
    while True:
        try:
            left = max(0.0, end - time.monotonic())
            status, headers, reply = await endpoint.fetch("POST", dialect.path, left, request)
        except HttpError as error:
            # A timer may end the wait some microseconds before `end`.
            option = f" ({longer})" if longer and isinstance(error, NoAnswer) else ""
            raise EndpointError(f"{where}: {error}{option}") from None
        busy_until = min(end, start + _BUSY_S.get(status, 0.0))
        if busy_until - time.monotonic() < 1:
            break
        await asyncio.sleep(1)
    if status != 200 and (not 400 <= status < 500 or status in (429, *_KEY, *_NO_SUCH_PATH)):
        refusal = failure_text(status, reply, headers.get("location"))
        advice = _NO_PATH if status in _NO_SUCH_PATH else _advice(status, endpoint)
        raise EndpointError(f"{where}: {refusal}{advice}")
    return status, reply


async def gives_usage(endpoint: RemoteServer, timeout_s: float) -> bool:
    """Return whether streams of a server have usage (token counts); also True if it is unknown."""
    try:
        return await _counts(endpoint, _STREAM, time.monotonic() + timeout_s, "", {})
    except EndpointError:
        return True


async def _counts(
    endpoint: RemoteServer, dialect: Dialect, end: float, longer: str, more: Mapping[str, Any]
) -> bool:
    """Return whether a stream of this server has usage (token counts)."""
    status, reply = await _probed(endpoint, dialect, end, longer, more, stream=True)
    answer = answer_at(dialect.path, True, 1)
    with contextlib.suppress(AnswerError, ValueError):  # an end token alone has no text
        answer.feed(reply, 0.0)
        answer.finish(0.0)
    return status == 200 and bool(answer.completion_tokens)
