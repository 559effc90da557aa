"""``python -m mpillm bench NAME``"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from disagg.errors import ConfigError, nearest
from launch.launcher import refuse_copies
from mpillm.errors import ExitCode

BENCHES = {
    "routing": "what everything around the model costs, with dummy cores",
    "endpoint": "a load test of a server over HTTP, reported as `vllm bench serve` does",
    "core-model": "load on the engine's model behind Triton, as benchmark_core_model.py puts it",
    "triton": "triton_grpc against one plain tritonclient, with a model of zero cost behind tritonserver",
    "http": "what HTTP costs beside the same work through MPI, with cores of zero cost",
    "engine": "the embedded engine: against transformers on a CPU, against the memory's floor on a GPU",
    "table": "whole runs beside the throughput that TensorRT-LLM publishes for one H200",
    "load": "loading weights from an engine's files against loading them from a checkpoint",
    "precision": "what types of weights, activations and KV cache cost: nats per token, likeliest"
    " tokens, answers",
    "all-reduce": "a sum over the GPUs of a TP group with its norm, by NCCL and in one kernel",
    "agreement": "answers and logits of tensor parallel instances against those of one rank",
    "soak": "a long test: what memory, threads and file descriptors each rank gains",
    "scale": "leader and rank 0 in a simulated cluster of thousands of ranks",
    "dataset": "loading a preprocessed data set: seconds and memory",
    "handoff": "KV caches between two ranks, against plain messages of the same size",
}

# On ranks of an mpirun; the others are one process, which starts what it needs.
_ON_RANKS = ("agreement", "all-reduce", "handoff")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that is named, with the options after its name."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m mpillm bench NAME [options]\n")
        width = max(map(len, BENCHES))
        for name, description in BENCHES.items():
            print(f"  {name:<{width}}  {description}")
        return ExitCode.DONE
    if argv[0] not in BENCHES:
        raise ConfigError(
            f"no benchmark '{argv[0]}'{nearest(argv[0], BENCHES)}; there are: {', '.join(BENCHES)}"
        )
    from mpillm.bench.ranks import run_on_ranks  # here, so that the list above is printed at once
    from mpillm.config.values import collect
    from mpillm.configurator.command_line import Parser

    name, *words = argv
    if name not in _ON_RANKS:
        refuse_copies(f"bench {name}")
    bench = importlib.import_module(f"mpillm.bench.bench_{name.replace('-', '_')}")
    if hasattr(bench, "words_of"):  # words of a script that stand among the options
        words = bench.words_of(words)
    parser = Parser(prog=f"mpillm bench {name}", description=bench.DESCRIPTION, epilog=bench.EPILOG)
    if name in _ON_RANKS:
        return run_on_ranks(words, bench.Options, parser, bench.main, bench.N_RANKS)
    return int(bench.main(collect(words, bench.Options, parser)))
