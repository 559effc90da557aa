"""The process that renders chats: ``python -m mpillm.data.template_process FD MAX_CPU_S MAX_BYTES``.

FD is a socket. The first message is ``{"template": ..., "special": {...}}``; each later message is
``{"chats": [...], "tools": ...}``. Each message has a reply: ``{"texts": [...]}`` or ``{"error": ...}``. If a
chat takes more CPU time than MAX_CPU_S, SIGPROF ends the process, even within a single call of Python's
library.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from mpillm.data.chat_template import encode, receive, send
from mpillm.files import DATA_ERRORS


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the response for training; mpillm renders its body as plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main(fd: int, max_cpu_s: float, max_bytes: int) -> None:
    """Answer messages until the other side closes its socket."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # an unprivileged process cannot raise it
    limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection = socket.socket(fileno=fd)
    template: jinja2.Template | None = None
    special: Mapping[str, str] = {}
    while True:
        try:
            message = receive(connection)
        except (EOFError, ConnectionError):
            return
        except MemoryError:
            sys.exit("mpillm: a chat has too many bytes for the memory of the process that renders it")
        texts: list[str] = []
        try:
            if template is None:
                signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
                template, special = _compiled(message["template"]), message["special"]
            else:
                for chat in message["chats"]:
                    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
                    texts.append(_rendered(template, chat, message["tools"], special))
            reply = encode({"texts": texts})
        except MemoryError:
            reply = encode({"error": "it takes too much memory"})
        except (jinja2.TemplateError, RecursionError, *DATA_ERRORS) as error:
            reply = encode({"error": str(error) or type(error).__name__})
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, reply)


def _compiled(template: str) -> jinja2.Template:
    """Compile a template, with the features of `transformers`' Jinja environment."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _rendered(template: jinja2.Template, chat: Any, tools: Any, special: Mapping[str, str]) -> str:
    for message in chat:
        for call in message.get("tool_calls") or ():
            _parse_arguments(call)
    text = template.render(messages=chat, tools=tools, documents=None, add_generation_prompt=True, **special)
    text.encode()  # raises for a lone surrogate
    return text


def _parse_arguments(call: Any) -> None:
    """Parse the arguments of a tool call: they are text in the API, and an object in templates."""
    function = call.get("function", call)
    if isinstance(arguments := function.get("arguments"), str):
        with contextlib.suppress(ValueError):  # a model may write anything
            function["arguments"] = json.loads(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
