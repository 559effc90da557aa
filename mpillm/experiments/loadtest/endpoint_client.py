"""Client of one OpenAI-compatible server, for sequential load tests."""

from __future__ import annotations

import sys
import time

from disagg.errors import ConfigError
from mpillm.cores.openai_client.client import Client
from mpillm.cores.openai_client.client_thread import ClientThread
from mpillm.cores.openai_client.endpoint import RemoteServer
from mpillm.cores.openai_client.readiness import choose_dialect, find_model, until_ready
from mpillm.cores.openai_client.server_counts import MAX_READ_S, ServerCounts, read_one
from mpillm.data.tokenizer import FileTokenizer, Tokenizer
from mpillm.experiments.loadtest.load_test import LoadTest
from mpillm.report.console import Console

_ANSWER_S = 60.0  # for the model's name, and for the first token
_DAY_S = 86400.0


class EndpointClient:
    """Context with a client: waits until the server is ready, and detects its dialect."""

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer,
        model: str | None,
        model_path: str | None,
        ready_deadline: float,
        stall_timeout: float,
    ) -> None:
        """`model`: its name at the server; None: the server's only model.

        Raises ConfigError for a wrong URL, EndpointError if the server is not ready in time or does not
        answer.
        """
        try:
            self.endpoint = RemoteServer(url)
        except ConfigError:  # the key
            raise
        except ValueError as error:
            raise ConfigError(f"--url {error}", about=["url"]) from None
        self._tokenizer = tokenizer
        self._silence_s = stall_timeout
        self._client: Client | None = None
        self._thread = ClientThread("mpillm-http")
        self._console = Console(sys.stdout, sys.stderr)
        began = time.monotonic()

        def report_wait(waiting: str) -> None:
            self._console.wait("ready", time.monotonic() - began, waiting)

        try:
            ready = until_ready(self.endpoint, ready_deadline, report_wait, longer="--ready_deadline")
            self._thread.run(ready, ready_deadline + _ANSWER_S)
            name = find_model(self.endpoint, model, model_path, _ANSWER_S)
            self.endpoint.model = self._thread.run(name, 2 * _ANSWER_S)
            has_tokenizer = isinstance(tokenizer, FileTokenizer)
            self._thread.run(choose_dialect(self.endpoint, has_tokenizer, _ANSWER_S), 2 * _ANSWER_S)
        except BaseException:
            self._thread.stop()
            raise
        self._console.line(f"{self.endpoint.url}, model {self.endpoint.model}: {self.endpoint.dialect.name}")

    def run(self, test: LoadTest) -> float:
        """Run a test and print its progress; return its duration in seconds."""
        if self._client is None:
            self._client = Client(
                [self.endpoint],
                test,
                lambda prompt: self._tokenizer.decode(prompt, keep_special=True),
                stream=True,
                silence_s=self._silence_s,
                retry_s=0.0,
            )

        def show() -> None:
            if (now := test.progress()) is not None:
                self._console.progress(now)

        lasted = self._thread.run(test.run(self._client), _DAY_S, show)
        self._console.clear()
        return lasted

    def server_counts(self) -> ServerCounts:
        """Return the server's own counts so far."""
        return self._thread.run(read_one(self.endpoint), 2 * MAX_READ_S)

    def cpu_s(self) -> float:
        """Return the CPU time of the client so far."""
        return self._thread.cpu_s()

    def __enter__(self) -> EndpointClient:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._thread.post(self._client.close)
        self._thread.stop()
