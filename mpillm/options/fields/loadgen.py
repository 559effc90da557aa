"""The test: by LoadGen, or by a load client (--harness)."""

from __future__ import annotations

from mpillm.core_names import EMBEDDED, TRTLLM_ENDPOINT
from mpillm.options.field import ANY, Effect, Options, Use, option
from mpillm.options.fields.effects import (
    FIND_MAX_QPS,
    LOAD_CLIENTS,
    OF_CONVERSATIONS,
    OF_LOADGEN,
    OF_PROMPTS,
    OWN_LOADS,
    PROMPTS,
    RUN,
    used_by,
)
from mpillm.options.latency_limits import ARGPARSE_OPTIONS, integer_limits_ms
from mpillm.options.parsers import (
    boolean,
    kind_of_program,
    length_of_a_test,
    not_negative,
    percent,
    positive,
    rate,
    shape_of_gamma,
    shell_args,
)
from mpillm.options.synthetic_conversations import synthetic_conversations
from mpillm.options.trace_columns import trace_columns
from mpillm.programs.load_clients.kinds import CONVERSATIONS, KINDS
from mpillm.workloads.rounds import ROUNDS

# find-max-qps sets the rate of each test.
_AT_A_RATE = (
    Use((RUN,), loads=(CONVERSATIONS,), needs=("server_target_qps", ANY)),
    Use((FIND_MAX_QPS,), loads=(CONVERSATIONS,)),
)


def or_conversations(*scenarios: str) -> Effect:
    """Return the effect of an option that LoadGen uses in these scenarios, and conversations in all."""
    return Effect((Use((RUN,), scenarios=scenarios, loads=PROMPTS), *OF_CONVERSATIONS.uses))


class LoadgenFields(Options, group="test", effect=OF_PROMPTS):
    """LoadGen's test."""

    test_mode = option(
        "LoadGen's mode", default="PerformanceOnly", choices=("PerformanceOnly", "AccuracyOnly")
    )
    round = option(
        "the MLPerf round whose seeds LoadGen takes, and in which the workload must count"
        " [default: the seeds of the installed LoadGen]",
        choices=tuple(r.name for r in ROUNDS),
    )
    user_conf = option("a LoadGen user.conf; it overrides mlperf.conf")
    audit_conf = option("a LoadGen audit.config, for compliance runs", effect=OF_LOADGEN)
    min_duration = option(
        "shortest time for the test: 600s, 10min or 600000ms; a bare number is seconds"
        " [default: 0, or user_conf's]",
        length_of_a_test,
        # A search for a rate makes tests of conversations from it that last about as long.
        effect=Effect((*OF_PROMPTS.uses, Use((FIND_MAX_QPS,), loads=(CONVERSATIONS,)))),
    )
    min_query_count = option(
        "minimum number of queries (Offline: samples)"
        " [default: enough for each sample once and for early stopping; or user_conf's]",
        positive,
    )
    max_query_count = option(
        "maximum number of queries; Offline has one of all samples [default: none, or user_conf's]",
        positive,
        effect=used_by(commands=[RUN], scenarios=["Server", "SingleStream"], loads=PROMPTS),
    )
    max_duration = option(
        "longest time from the start of the test to its last query; written as min_duration"
        " [default: none, or user_conf's]",
        length_of_a_test,
        effect=or_conversations("Server", "SingleStream"),
    )
    server_target_qps = option(
        "queries per second; Server needs it", rate, effect=used_by(commands=[RUN], scenarios=["Server"])
    )
    offline_expected_qps = option(
        "Offline: expected samples per second; the query has this times min_duration samples",
        rate,
        effect=used_by(commands=[RUN], scenarios=["Offline"], loads=PROMPTS),
    )
    goodput = option(
        "Server and conversations: latency limits in place of the workload's, milliseconds at the 99th"
        " percentile: ttft:500 tpot:50 e2el:9000, or AIPerf's names time_to_first_token,"
        " inter_token_latency, request_latency; a latency that is not listed has no limit",
        integer_limits_ms,
        effect=or_conversations("Server"),
        argparse_opts=ARGPARSE_OPTIONS,
    )
    require_valid = option(
        "treat an INVALID result as an error (exit code 4)", boolean, default=False, effect=OF_LOADGEN
    )
    compliance_test = option(
        "make a compliance run, with this test's audit.config",
        choices=("TEST06", "TEST07", "TEST09"),
        effect=OF_LOADGEN,
    )
    cache_salt = option(
        "requests share cached prompts only within one test, one conversation or one request: each has a salt"
        " of its own [default: no salts]",
        choices=("test", "conversation", "request"),
        effect=used_by(*EMBEDDED, *TRTLLM_ENDPOINT, commands=[RUN], loads=OWN_LOADS),
    )


_OF_CLIENTS = used_by(commands=[RUN], loads=[LOAD_CLIENTS])


class OtherHarnessFields(Options, group="other harness"):
    """Load clients, which replace LoadGen."""

    harness = option(
        "let this client make the load in LoadGen's place: conversations (mpillm's own: a request follows the"
        " previous response), inference-endpoint, aiperf, guidellm, vllm-bench, or command:WORDS, which must"
        " contain {report} and either {url} or {urls}, and may contain {model}, {tokenizer}, {bodies},"
        " {requests}, {rate}, {concurrency} and {seed}",
        kind_of_program(KINDS, CONVERSATIONS),
        effect=used_by(commands=[RUN]),
    )
    harness_args = option(
        "further options for the client's command line, as typed there",
        shell_args,
        default=(),
        effect=_OF_CLIENTS,
    )
    concurrency = option(
        "requests, or conversations, that are open simultaneously [default: all, in scenario Offline]",
        positive,
        effect=used_by(commands=[RUN], scenarios=["Offline"], loads=[LOAD_CLIENTS, CONVERSATIONS]),
    )
    harness_memory_limit = option(
        "GiB of host memory that the client's processes may use together, shared pages counted once;"
        " using more counts as a failure",
        rate,
        effect=_OF_CLIENTS,
    )


class ConversationFields(Options, group="conversations", effect=OF_CONVERSATIONS):
    """Load of --harness conversations. In scenario Server, server_target_qps counts conversations."""

    num_conversations = option(
        "conversations to start; after the data set's last one, its first one follows [default: each once;"
        " with synthetic_conversations 100]",
        positive,
    )
    synthetic_conversations = option(
        "generate num_conversations conversations in place of a data set: turns, input and output (tokens of"
        " a turn), delay (seconds between turns), each as N, MEAN:STDEV (normal) or MIN-MAX (uniform); system"
        " (tokens that all begin with), prefix and groups (tokens that each group shares), as in"
        " turns=5,input=200:40,output=150,delay=0.5-2,system=1000,groups=4,prefix=500",
        synthetic_conversations,
        argparse_opts={"metavar": "KEY=VALUE,…"},
    )
    history = option(
        "the responses in the prompts of later turns: recorded in the data set, or generated in the test"
        " [default: recorded, if the data set has them all]",
        choices=("recorded", "generated"),
    )
    burstiness = option(
        "with server_target_qps: shape of the gamma distribution of intervals between conversations, as in"
        " vLLM's benchmark. 1: Poisson; less: bursts; inf: constant intervals",
        shape_of_gamma,
        default=1.0,
        effect=Effect(_AT_A_RATE),
    )
    trace_speed = option("divides time stamps and delays of the data set", rate, default=1.0)
    shuffle = option(
        "put the data set's conversations in random order, by seed; results count samples in this order",
        boolean,
        default=False,
    )
    max_input_len = option(
        "leave out conversations of the data set with a prompt of more tokens, as far as prompts are known"
        " before the test",
        positive,
        # Only the servers know the tokens of chats.
        effect=used_by(commands=[RUN], loads=[CONVERSATIONS], needs=("endpoint_type", "completions")),
    )
    max_delay = option(
        "the most seconds of the test for a delay, and for the gap between two time stamps of a conversation;"
        " 0 leaves delays out [default: as in the data set]",
        not_negative,
    )
    trace_columns = option(
        "names of a trace's columns with other names than Mooncake's: timestamp=Timestamp,"
        "input_length=Request tokens,output_length=Response tokens,timestamp_unit=s. Rows without output"
        " tokens are left out",
        trace_columns,
        argparse_opts={"metavar": "KEY=COLUMN,…"},
    )
    request_cancellation_rate = option(
        "percent of the requests to cancel: the client disconnects, or the engine drops the request. The"
        " conversation continues [default: none]",
        percent,
    )
    request_cancellation_delay = option(
        "seconds from sending a request to its cancellation; a request that ends earlier is not cancelled",
        not_negative,
        default=0.0,
        effect=used_by(commands=[RUN], loads=[CONVERSATIONS], needs=("request_cancellation_rate", ANY)),
    )
    ramp_up = option(
        "seconds over which the first conversations start, or over which the rate of server_target_qps grows"
        " linearly; only the figures of turns and the interactivity leave this time out",
        not_negative,
        default=0.0,
        effect=Effect((*_AT_A_RATE, Use((RUN,), scenarios=("Offline",), loads=(CONVERSATIONS,)))),
    )
