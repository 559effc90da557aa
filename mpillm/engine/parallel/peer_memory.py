"""Memory of a GPU that the GPUs of other processes read and write over NVLink, by CUDA's driver API.

Each rank allocates memory, and opens the other ranks' memory by handles that go over MPI (CUDA IPC).
"""

from __future__ import annotations

import ctypes
import logging
import platform
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger(__name__)
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * 64),)


class ExportedMemory(NamedTuple):
    """Memory that other processes of the host can open."""

    host: str
    bus_id: bytes  # of the GPU
    handle: bytes
    offset: int  # in the memory that the handle opens


def export(tensor: torch.Tensor) -> ExportedMemory:
    """Export `tensor` to other processes, while it exists. Raises RuntimeError if the driver refuses."""
    torch.cuda.current_stream().synchronize()  # makes PyTorch's CUDA context current in this thread
    cuda, base, handle = _driver(), ctypes.c_uint64(), _Handle()
    _check(cuda.cuMemGetAddressRange_v2(ctypes.byref(base), None, ctypes.c_uint64(tensor.data_ptr())))
    _check(cuda.cuIpcGetMemHandle(ctypes.byref(handle), base))
    return ExportedMemory(_host(), _bus_id(cuda), bytes(handle), tensor.data_ptr() - base.value)


def reach(exported: list[ExportedMemory]) -> list[int]:
    """Return the addresses of another process's memory in this process; raise RuntimeError if it fails."""
    torch.cuda.current_stream().synchronize()
    if any(one.host != _host() for one in exported):
        raise RuntimeError("it is on another host")
    cuda = _driver()
    return [_open(cuda, one.handle, one.bus_id) + one.offset for one in exported]


def _host() -> str:
    """Return a name that differs between running hosts, but not between containers of one host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii").strip() if boot.exists() else platform.node()


def share_memory(comm: MPI.Intracomm, n_bytes: int) -> list[int] | None:
    """Allocate `n_bytes` of zeros on each rank's GPU; return their addresses in this process. Collective.

    The memory is freed with the process. Returns None on all ranks if a GPU cannot access the memory of every
    other GPU with atomics: on several nodes, without NVLink, or in containers that may not share memory. The
    rank that fails logs the reason.
    """
    from mpi4py import MPI

    own_export: tuple[bytes, bytes, int] | None = None
    try:
        cuda = _driver()
        own, handle = _allocate(cuda, n_bytes)
        own_export = (bytes(handle), _bus_id(cuda), own)
    except RuntimeError as error:
        _log.warning("no memory of this GPU for others: %s", error)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    is_one_node = node.size == comm.size
    node.Free()
    addresses: list[int] | None = None
    everyone = comm.allgather(own_export)
    if is_one_node and own_export is not None and None not in everyone:
        try:
            addresses = [
                own_export[2] if rank == comm.rank else _open(cuda, other[0], other[1])
                for rank, other in enumerate(everyone)
            ]
        except RuntimeError as error:
            _log.warning("no access to another GPU's memory: %s", error)
    return addresses if comm.allreduce(addresses is not None, MPI.LAND) else None


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(error) from error


def _bus_id(cuda: ctypes.CDLL) -> bytes:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(32)
    _check(cuda.cuCtxGetDevice(ctypes.byref(device)))
    _check(cuda.cuDeviceGetPCIBusId(name, ctypes.c_int(len(name)), device))
    return name.value


def _allocate(cuda: ctypes.CDLL, n_bytes: int) -> tuple[int, _Handle]:
    torch.cuda.current_stream().synchronize()  # makes PyTorch's CUDA context current in this thread
    address, handle = ctypes.c_uint64(), _Handle()
    _check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(n_bytes)))
    _check(cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(n_bytes)))
    _check(cuda.cuCtxSynchronize())
    _check(cuda.cuIpcGetMemHandle(ctypes.byref(handle), address))
    return address.value, handle


def _open(cuda: ctypes.CDLL, handle: bytes, bus_id: bytes) -> int:
    """Return the address of another process's memory in this process; raise RuntimeError if it fails."""
    own, other, has_atomics = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _check(cuda.cuDeviceGetByPCIBusId(ctypes.byref(own), _bus_id(cuda)))
    _check(cuda.cuDeviceGetByPCIBusId(ctypes.byref(other), bus_id))
    if own.value != other.value:  # ranks on one GPU need no peer access
        _check(cuda.cuDeviceGetP2PAttribute(ctypes.byref(has_atomics), _NATIVE_ATOMICS, own, other))
        if not has_atomics.value:
            raise RuntimeError("no atomics between two GPUs")
    address = ctypes.c_uint64()
    opened = cuda.cuIpcOpenMemHandle_v2
    opened.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
    _check(opened(ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS))
    return address.value


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA error {result}")
