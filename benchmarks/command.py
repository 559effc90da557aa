"""The list of benchmarks, and the start of the one that is named."""

from __future__ import annotations

from collections.abc import Sequence

from mpillm.errors import ExitCode
from mpillm.experiments.commands.bench import find

BENCHES = {
    "engine": "the embedded engine on a CPU: against transformers, vLLM, or itself with draft tokens",
    "http": "what HTTP costs beside the same work through MPI, with cores of zero cost",
    "harness-agreement": "what another client measures of a server, beside LoadGen and ours",
    "owned": "a server that a rank owns beside the same one started by hand",
    "triton": "triton_grpc against one plain tritonclient, with a model of zero cost behind tritonserver",
    "scale": "leader and rank 0 in a simulated cluster of thousands of ranks",
    "soak": "a long test: what memory, threads and file descriptors each rank gains",
    "dataset": "loading a preprocessed data set: seconds and memory",
    "load": "loading weights from an engine's files against loading them from a checkpoint",
    "decode": "decode steps on a GPU beside the memory's floor, their parts beside the roofline",
    "products": "a layer's matrix products on a CPU, compiled and without a compiler",
    "precision": "what types of weights, activations and KV cache cost: nats per token, likeliest"
    " tokens, answers",
    "agreement": "answers and logits of tensor parallel instances against those of one rank",
    "all-reduce": "a sum over the GPUs of a TP group with its norm, by NCCL and in one kernel",
    "handoff": "KV caches between two ranks, against plain messages of the same size",
}
WITH_JSON = ("engine",)  # have the option --json
ON_RANKS = ("agreement", "all-reduce", "handoff")  # of an mpirun; the others are one process


def module_of(name: str) -> str:
    """Return the module of a benchmark."""
    return f"benchmarks.{name.replace('-', '_')}"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that is named, with the options after its name."""
    from mpillm.options.values import collect

    named = find("benchmarks", BENCHES, module_of, argv, figures=bool({*argv[:1]} & {*WITH_JSON}))
    if named is None:
        return ExitCode.DONE
    bench, parser, words = named
    if argv[0] not in ON_RANKS:
        return int(bench.main(collect(words, bench.Options, parser)))
    from benchmarks.on_ranks import run_on_ranks

    return run_on_ranks(words, bench.Options, parser, bench.main, bench.N_RANKS)
