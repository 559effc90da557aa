"""Clients of other people that make the load in LoadGen's place."""

from __future__ import annotations

from mpillm.configurator import Options, option
from mpillm.configurator.effect import ANY
from mpillm.configurator.parsers import positive, rate, shell_words
from mpillm.fields.effects import RUN, used_by
from mpillm.harnesses.kinds import harness as harness_kind

_OF_A_HARNESS = used_by(commands=[RUN], needs=("harness", ANY))


class OtherHarnessFields(Options, group="other harness"):
    """Clients of other people that make the load in LoadGen's place."""

    harness = option(
        "start this client in LoadGen's place: inference-endpoint, aiperf, guidellm, vllm-bench, or"
        " command:WORDS with {url} and {report} in them, and {urls}, {model}, {tokenizer}, {bodies},"
        " {requests}, {rate}, {concurrency} or {seed}",
        harness_kind,
        effect=used_by(commands=[RUN]),
    )
    harness_args = option(
        "more options of the client's command line, as they are typed there",
        shell_words,
        default=(),
        effect=_OF_A_HARNESS,
    )
    concurrency = option(
        "requests that the client keeps open at once [default: all, in scenario Offline]",
        positive,
        effect=used_by(commands=[RUN], scenarios=["Offline"], needs=("harness", ANY)),
    )
    harness_memory_limit = option(
        "GiB of host memory that the processes of the client may hold together; more is its failure",
        rate,
        effect=_OF_A_HARNESS,
    )
