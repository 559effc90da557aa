"""``python -m mpillm triton-client``: send requests to a Triton server, like NVIDIA's client scripts."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from disagg.errors import ConfigError, nearest
from mpillm.errors import ExitCode, needs_extra

NAMES = {
    "tokens": "a request to tensorrt_llm: inflight_batcher_llm_client.py",
    "text": "prompts to ensemble or tensorrt_llm_bls: end_to_end_grpc_client.py",
}


def main(argv: Sequence[str]) -> int:
    """Run the named client with the remaining arguments."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m mpillm triton-client tokens|text [options]\n")
        for name, description in NAMES.items():
            print(f"  {name:<6}  {description}")
        return ExitCode.DONE
    name, *args = argv
    if name not in NAMES:
        raise ConfigError(f"no client '{name}'{nearest(name, NAMES)}; there are: {', '.join(NAMES)}")
    with needs_extra("triton-client", "triton"):
        client = importlib.import_module(f"mpillm.triton.client.{name.removesuffix('s')}_client")
    return int(client.run(args))
