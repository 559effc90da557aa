"""The embedded engine as a core: models with PyTorch, on CPUs or NVIDIA GPUs.

`load` imports PyTorch and the modules that use it; `check` and the constructor import the readers of models.
The module imports neither, because commands without a model, and ranks without an instance, also use it.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.comms.messages import Batch
from mpillm.core_names import provided
from mpillm.cores.base import CoreConfig, Credits, LLMCore, Metrics, short_requests
from mpillm.cores.draft_counts import ACCEPTED, DRAFTED, VERIFICATIONS, accepted_at
from mpillm.cores.torch_rows import new_sequence, responses
from mpillm.devices import Gpu
from mpillm.engine.run import compilations
from mpillm.engine.schedule.context_piece import context_piece
from mpillm.engine.tensors.load_torch import load_torch
from mpillm.engine.weights import bytes_held
from mpillm.errors import Failure, RunError
from mpillm.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.comms.mover import Mover, MpiMover, Peer
    from mpillm.engine.cache.kv_cache import KVCache
    from mpillm.engine.cache.two_caches import TwoCaches
    from mpillm.engine.engine import Engine
    from mpillm.engine.extras.lora import Adapter
    from mpillm.engine.extras.request_extras import RequestExtras
    from mpillm.engine.handoff.host_end import Cache, HostEnd
    from mpillm.engine.handoff.host_mover import HostMover
    from mpillm.engine.handoff.pinned import PinnedMemory
    from mpillm.engine.handoff.transfers import Transfers
    from mpillm.engine.run.worker import Follower, Worker
    from mpillm.engine.shape.model_info import ModelInfo

_log = logging.getLogger(__name__)
_MAX_WARM_UP = 64  # requests
_HEALTH_PAUSE_S = 0.0005
_TIMED = 3  # prompts of each size, of which the fastest counts
# GPU memory of the KV cache divided by the memory of transfer buffers, which the cache leaves free
_CACHE_TO_BUFFERS = 32
# Limit of the root rank's pinned memory for caches between a GPU and another run. Other ranks have an eighth.
_PINNED = 4 << 30
_MEMORY_TO_PINNED = 16  # a rank's share of the available host memory divided by its pinned memory


_STAGES = provided("STAGES")


class TorchCore(LLMCore):
    """An engine, or a rank that follows one: each `poll_responses` runs a step.

    A request that can never be answered gets an ERROR row; the log has the reason.
    """

    uses_gpus = True
    needs_model = True
    gives_logprobs = True
    reports_reuse = True
    speculates = True
    tunes_steps = True
    engine_stages = _STAGES.get("engine_stages")
    servers = _STAGES.get("servers")
    framework = "PyTorch"
    imports = ("torch", "safetensors")
    packages = ("torch", "triton")

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        """Read the model. Raises ConfigError as `model_info` does.

        Memory is not checked, because another rank of the node may be loading already.
        """
        from mpillm.engine.shape.model_info import model_info

        super().__init__(config, comms)
        self.info = model_info(config.engine)
        self._refused: list[int] = []
        self.worker: Worker | None = None
        self._runs: Engine | Follower | None = None  # an engine if this rank leads its instance
        self._handoff: tuple[Mover, dict[int, Peer]] | None = None
        self._host_mover: HostMover | None = None  # if this GPU's partner is another run
        self._pinned: PinnedMemory | None = None  # likewise
        self._before_test: dict[str, int] = {}
        self._computed_before_test = (0, 0)  # tokens of prompts and of answers
        self._compiled_before_test = 0

    @classmethod
    def check(cls, config: CoreConfig) -> ModelInfo:
        from mpillm.engine.shape.model_info import check_model
        from mpillm.engine.speculation.check_speculation import check_speculation

        engine = config.engine
        info = check_model(engine)
        check_speculation(engine, info)
        if engine.enable_max_num_tokens_tuning and not engine.scheduler.enable_chunked_context:
            raise ConfigError(
                "--enable_max_num_tokens_tuning has no effect without --enable_chunked_context true",
                about=["enable_max_num_tokens_tuning", "enable_chunked_context"],
            )
        return info

    @classmethod
    def gpus(cls) -> tuple[Gpu, ...]:
        """Return the GPUs as the base class does; none if PyTorch was built without CUDA."""
        return super().gpus() if _has_cuda() else ()

    # --- life ---

    def load(self) -> None:
        load_torch()
        import torch

        from mpillm.engine.engine import Engine
        from mpillm.engine.run.worker import Follower

        config, info = self.config.engine, self.info
        torch.set_num_threads(config.n_threads)
        worker = self.worker = self._make_worker()
        if self._handoff is not None:
            worker.transfers = self._make_transfers(worker.part.handed_over, *self._handoff)
        worker.warm_up(config.scheduler.max_num_tokens)
        if self._leads:
            max_transfer_tokens = (
                None if config.gpu_bytes is None else info.kv_cache_tokens // _CACHE_TO_BUFFERS
            )
            engine = self._runs = Engine(info, config.scheduler, worker, max_transfer_tokens)
            if (
                config.speculative_config and config.role != "context"
            ):  # a context instance computes only first tokens
                from mpillm.engine.speculation.start_speculation import start_speculation

                engine.speculation = start_speculation(config, worker, engine.scheduler)
        else:
            self._runs = Follower(worker)

    def _make_transfers(self, cache: KVCache | TwoCaches, mover: Mover, peers: dict[int, Peer]) -> Transfers:
        from mpillm.comms.mover import MpiMover, Peer
        from mpillm.engine.handoff.transfers import Transfers, partners

        config, layout, sends = self.info.config, self.info.layout, self.config.role == "context"
        of_host = not peers
        peers = peers or {0: Peer(0, 1, 1)}
        if self.config.engine.gpu_bytes is None:
            return Transfers(cache, config, layout, mover, peers, sends=sends)
        assert isinstance(mover, MpiMover)
        max_bytes = sum(pool.nbytes for pool in cache.pools) // _CACHE_TO_BUFFERS
        if of_host:
            mover = self._host_mover = self._make_host_mover(mover)
            return Transfers(cache, config, layout, mover, peers, sends=sends, max_bytes=max_bytes)
        from mpillm.engine.handoff.nccl_mover import NcclMover
        from mpillm.engine.handoff.peer_mover import PeerMover

        ranks = partners(config, layout, peers.values(), sends=sends)
        peer_mover = PeerMover.connected(mover.comm, ranks, cache, sends=sends)
        mover = NcclMover.connected(mover.comm, ranks - peer_mover.ranks, sends=sends)
        return Transfers(
            cache, config, layout, mover, peers, sends=sends, max_bytes=max_bytes, block_mover=peer_mover
        )

    def _make_host_mover(self, mover: MpiMover) -> HostMover:
        from mpillm.engine.handoff.host_mover import CopyStream, HostMover
        from mpillm.engine.handoff.pinned import PinnedMemory
        from mpillm.telemetry.free_memory import available_bytes

        max_bytes = available_bytes() // (_MEMORY_TO_PINNED * self.config.engine.node_ranks)
        self._pinned = PinnedMemory(min(max_bytes, _PINNED if self._leads else _PINNED // 8))
        return HostMover(mover, mover.comm.rank, self._pinned, CopyStream())

    def _make_worker(self) -> Worker:
        import torch

        from mpillm.engine.parallel.groups import Groups, MpiGroups
        from mpillm.engine.run.worker import Worker

        config, layout = self.config.engine, self.info.layout
        alone = self.comms is None or self.comms.instance.size == 1
        if config.gpu_bytes is None:
            groups = Groups(layout) if self.comms is None or alone else MpiGroups(layout, self.comms)
            return Worker.on_cpu(config, self.info, groups)
        from mpillm.engine.parallel.nccl import NcclGroups

        torch.cuda.set_device(config.gpu or 0)
        groups = Groups(layout) if self.comms is None or alone else NcclGroups(layout, self.comms)
        return Worker.on_gpu(config, self.info, groups)

    def doing(self) -> str:
        if self._runs is None:
            total, read = self.info.n_bytes, min(bytes_held.count(), self.info.n_bytes)
            if not read:
                return "starts the engine, no weights are read yet"
            return f"{read / 1e9:.2f} of {total / 1e9:.2f} GB of weights"
        n = compilations.count()
        return f"{n} kernels and graphs compiled" if n else ""

    def run_health_check(self) -> None:
        """Generate a token from a one-token prompt, on all ranks of the instance, with an idle engine.

        Then tune the prompt tokens of a step, if the option is set. Raises RunError if the model computes NaN
        or infinity: every answer would be the same token, and a test of such answers would be VALID.
        """
        if not self._leads:
            return
        self._first_token_s(1)
        if not math.isfinite(self._first_logprob):
            raise RunError(
                Failure(
                    f"{self.config.engine.model_path} computes no finite numbers (NaN or infinite logits):"
                    " its weights are damaged, or too large for --dtype or --kv_cache_dtype",
                    self.config.rank,
                )
            )
        if self._tunes:
            scheduler = self.config.engine.scheduler
            size = scheduler.tokens_per_block
            max_tokens = min(self.info.max_seq_len, self.info.kv_cache_tokens // size * size) - 1
            max_tokens = min(max_tokens, scheduler.max_num_tokens)
            self.engine.scheduler.context_piece = context_piece(
                lambda n: min(self._first_token_s(n) for _ in range(_TIMED)), max_tokens
            )

    def _first_token_s(self, n: int) -> float:
        """Return the seconds from a new prompt of `n` tokens to its first token."""
        from mpillm.engine.schedule.sampling_params import SamplingParams
        from mpillm.engine.schedule.sequence import Sequence

        sequence = Sequence(
            id=0,
            prompt=[0] * n,
            max_output=1,
            min_output=0,
            sampling=SamplingParams(),
            salt=secrets.token_bytes(16),
            wants_logprobs=2,  # of the token itself, and of the likeliest
        )
        started = time.perf_counter()
        self.engine.add(sequence)
        while not sequence.output:
            if not self.engine.has_work():
                time.sleep(_HEALTH_PAUSE_S)
            self.engine.step()
        seconds = time.perf_counter() - started
        self._first_logprob = float(np.array(sequence.logprobs[0], np.int32).view(np.float32)[0])
        return seconds

    def warm_up_requests(self) -> Batch:
        """Return as many short requests as the batch and the cache hold, to prepare memory and kernels."""
        n_prompt, n_output = 8, 4
        if self.info.max_seq_len < n_prompt + n_output:
            n_prompt, n_output = 1, 1
        scheduler = self.config.engine.scheduler
        n_fit = self.info.kv_cache_tokens // (2 * scheduler.tokens_per_block)
        n = max(1, min(scheduler.max_batch_size, _MAX_WARM_UP, n_fit))
        return short_requests(n, n_prompt, n_output, n_output)

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def start_test(self) -> None:
        if self._leads and self.config.resets_prefix_cache:
            self.reset_prefix_cache()
        self._compiled_before_test = compilations.count()
        if self._leads:
            self._before_test = self._counts()
            self._computed_before_test = self.engine.prompt_tokens, self.engine.generated_tokens

    def record_steps(self, recorder: Recorder) -> None:
        if self._runs is not None:
            self._runs.recorder = recorder

    def statistics(self) -> dict[str, float]:
        counts: dict[str, float] = {
            name: count - self._before_test.get(name, 0) for name, count in self._counts().items()
        }
        if self._tunes:
            counts["context_piece"] = self.engine.scheduler.context_piece
        return counts

    def compiled_in_test(self) -> list[str]:
        return compilations.since(self._compiled_before_test)

    def metrics(self) -> Metrics:
        engine, (prompt_tokens, generated_tokens) = self.engine, self._computed_before_test
        return Metrics(
            engine.prompt_tokens - prompt_tokens,
            engine.generated_tokens - generated_tokens,
            len(engine.scheduler.running),
            len(engine.scheduler.waiting),
            1 - engine.blocks.n_free / engine.blocks.n_blocks,
        )

    def _counts(self) -> dict[str, int]:
        """Return the counts since the start. Reused blocks and draft tokens are included only if enabled."""
        from mpillm.engine.schedule.prefix_cache import PrefixCache

        counts = {"preemptions": self.engine.scheduler.preemptions}
        if isinstance(blocks := self.engine.blocks, PrefixCache):
            counts["reused_blocks"] = blocks.reused_blocks
            counts["reused_tokens"] = blocks.reused_blocks * self.config.engine.scheduler.tokens_per_block
            if blocks.host is not None:
                counts["loaded_blocks"] = blocks.host.loaded_blocks
        if self.config.role == "context":
            token_bytes = self.info.config.kv_bytes_per_token(self.info.kv_dtype)
            counts["kv_bytes"] = self.engine.handoffs.sent_tokens * token_bytes
        if (speculation := self.engine.speculation) is not None:
            counts[DRAFTED] = speculation.drafted_tokens
            counts[ACCEPTED] = speculation.accepted_tokens
            counts[VERIFICATIONS] = speculation.verifications
            counts |= {accepted_at(i): n for i, n in enumerate(speculation.accepted_at)}
        return counts

    @property
    def _tunes(self) -> bool:
        return self.config.engine.enable_max_num_tokens_tuning and self.config.role != "generation"

    def notify_stop(self) -> None:
        self._runs = self.worker = None

    @property
    def _leads(self) -> bool:
        return self.config.engine.tp_rank == self.config.engine.pp_rank == 0

    @property
    def engine(self) -> Engine:
        if self._runs is None or not self._leads:
            raise RuntimeError("the torch core is not loaded, or does not lead its instance")
        return cast("Engine", self._runs)

    # --- work ---

    def credits(self) -> Credits:
        """Grant credits for two batches and two KV caches: the next requests wait here, not at the leader.

        A generation instance grants only one KV cache: requests that wait for this cache hold blocks of a
        context instance.
        """
        n_caches = 1 if self.config.role == "generation" else 2
        return Credits(2 * self.config.engine.scheduler.max_batch_size, n_caches * self.info.kv_cache_tokens)

    def enqueue(self, requests: Batch) -> None:
        self.enqueue_with_extras(requests, {})

    @property
    def takes_extras(self) -> bool:
        return self.info.layout.pp_size == 1

    @property
    def takes_adapters(self) -> bool:
        return self.takes_extras and self.config.engine.gpu_bytes is None

    def make_adapter(self, weights: NDArray[Any], config: NDArray[np.int32]) -> Adapter:
        from mpillm.engine.extras.lora import Adapter

        assert self.worker is not None
        return Adapter(weights, config, self.info.config, self.worker.part.dtype, self.info.layout)

    def enqueue_with_extras(self, requests: Batch, extras_by_id: Mapping[int, RequestExtras]) -> None:
        from mpillm.engine.refusal import refusal

        offsets = requests.offsets()
        for i, row in enumerate(requests.rows):
            sequence = new_sequence(row, requests.tokens[offsets[i] : offsets[i + 1]])
            extras = extras_by_id.get(sequence.id) if extras_by_id else None
            if extras is not None:
                sequence.extras, sequence.salt = extras, extras.salt
            why = refusal(sequence, self.info, self.engine.config)
            if why is None:
                self.engine.add(sequence)
            else:
                _log.error("request %d: %s", sequence.id, why)
                if extras is not None:
                    extras.error = why
                self._refused.append(sequence.id)

    def cancel(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            self.engine.cancel(id_)

    def has_work(self) -> bool:
        return bool(self._refused) or (self._runs is not None and self._runs.has_work())

    def quiet_s(self) -> float:
        if self.config.engine.gpu_bytes is not None:
            return 0.0  # NCCL and GPUs do not wake the rank
        return math.inf if self._runs is None or self._runs.is_quiet() else 0.0

    def poll_responses(self) -> Batch | None:
        progress = [] if self._runs is None else self._runs.step()
        if not progress and not self._refused:
            return None
        refused, self._refused = self._refused, []
        return responses(progress, refused)

    # --- handoff ---

    def connect(self, mover: Mover, peers: dict[int, Peer]) -> None:
        self._handoff = mover, peers

    def host_end(self) -> HostEnd:
        from mpillm.comms.mover import Peer
        from mpillm.engine.handoff.host_end import HostEnd

        assert self._handoff is not None
        config, kv_bytes = self.config.engine, self.info.config.kv_bytes_per_token(self.info.kv_dtype)
        instance = Peer(0, config.tp_size, config.pp_size)
        mover = self._host_mover.host_end if self._host_mover else self._handoff[0]
        takes = config.role == "context"
        return HostEnd(self.info.config, kv_bytes, mover, instance, takes=takes, new=self.new_cache)

    def new_cache(self, n_bytes: int) -> Cache:
        return np.empty(n_bytes, np.uint8) if self._pinned is None else self._pinned.new(n_bytes)

    def lose_peer(self, instance: int) -> None:
        if self.worker is not None and self.worker.transfers is not None:
            self.worker.transfers.lose(instance)

    def poll_kv(self) -> list[int]:
        return [] if self._runs is None else self._runs.poll_kv()

    def release_kv(self, request_id: int) -> None:
        self.engine.handoffs.release(request_id)

    def started(self) -> list[int]:
        return [] if self._runs is None else self.engine.handoffs.started()

    def send_kv(self, request_id: int, receiver: int, slot: int) -> None:
        self.engine.handoffs.send(request_id, receiver, slot)

    def receive_kv(self, request: Batch, sender: int, slot: int) -> bool:
        row = request.rows[0]
        return self.engine.handoffs.receive(
            int(row["id"]), int(row["n_tokens"]), int(row["max_output"]), sender, slot
        )

    def admit(self, request: Batch, first_token: int) -> None:
        sequence = new_sequence(request.rows[0], request.tokens)
        sequence.hands_off = False
        sequence.output = [first_token]
        sequence.n_passed_on = sequence.n_logprobs_sent = 1
        self.engine.admit(sequence)


def _has_cuda() -> bool:
    """Return whether PyTorch has CUDA, from its files: importing it takes a second."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return (
        version is not None
        and version.is_file()
        and not re.search(r"^cuda\b.*= *None", version.read_text(), re.MULTILINE)
    )
