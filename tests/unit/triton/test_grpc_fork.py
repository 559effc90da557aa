"""Children of a process that uses gRPC."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("tritonclient.grpc")

SCRIPT = """
import os, subprocess, sys
from concurrent import futures
from mpillm.triton.{package} import {module}
import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

class Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    def ServerLive(self, request, context):
        return service_pb2.ServerLiveResponse(live=True)

server = grpc.server(futures.ThreadPoolExecutor(1))
service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(f"127.0.0.1:{{port}}"))
failed = 0
for _ in range(400):
    assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=300).live
    failed += subprocess.call(["true"], preexec_fn=os.getpid, stderr=subprocess.DEVNULL, timeout=300) != 0
print(failed, flush=True)
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.parametrize(("package", "module"), [("core", "stream"), ("client", "connection")])
def test_no_child_is_aborted(package: str, module: str) -> None:
    script = SCRIPT.format(package=package, module=module)
    env = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300
    )
    assert ended.stdout == "0\n", ended.stderr[-2000:]
