"""``benchmarks load``: time to a rank's first token from a checkpoint and from a built engine."""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from disagg.errors import ConfigError
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.model_info import check_model, model_info
from mpillm.options.field import Field
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import integers, positive
from mpillm.options.values import Values


class Options(Values):
    """Options of ``benchmarks load``."""

    model_path = ModelFields.model_path.but("folder of a Hugging Face checkpoint", group="benchmark")
    tensor_parallelism = Field(
        "tensor_parallelism",
        "tensor parallel sizes, separated by commas; the first rank of each loads",
        integers,
        default=(1,),
        group="benchmark",
    )
    dtype = ModelFields.dtype.but("type of the engine's weights", default="auto", group="benchmark")
    quantization = ModelFields.quantization.but(
        "type of the engine's layers' weights",
        default="auto",
        choices=("auto", "none", "int8", "fp8"),
        group="benchmark",
    )
    n_threads = Field("n_threads", "CPU threads", positive, default=2, group="benchmark")
    repeats = Field("repeats", "rounds; the median is printed", positive, default=5, group="benchmark")


_DEADLINE_S = 600.0
_MIB = 1 << 20


class Loaded(NamedTuple):
    """The figures of a process."""

    load_s: float  # until the model is loaded
    first_s: float  # until it has computed a token
    cpu_s: float  # of all threads, until then
    peak: int  # bytes of memory at most, mapped files included
    imports: int  # bytes of memory before


DESCRIPTION = (
    "Compare loading from a checkpoint with loading from an engine (pre-sharded weights),"
    " on a CPU, with the files in the page cache."
)
EPILOG = (
    "example:\n  python -m benchmarks load --model_path build/models/smollm2-135m --tensor_parallelism 1,3"
)


def main(config: Options) -> int:
    """Print the table."""
    engine = EngineConfig(
        model_path=config.model_path,
        dtype=config.dtype,
        quantization=config.quantization,
        n_threads=config.n_threads,
    )
    if model_info(engine).folder is None:
        raise ConfigError(
            f"--model_path {config.model_path}: a preset has no files to load; a folder is needed"
        )
    print(
        f"{config.model_path}, {config.repeats} rounds in turns: medians (least to most);"
        " memory without what PyTorch takes"
    )
    print(
        f"  {'TP':>2} {'from':<10} {'model loaded, s':>22} {'first token, s':>22}"
        f" {'CPU until then, s':>22} {'peak memory, MiB':>22}"
    )
    for tp_size in config.tensor_parallelism:
        with tempfile.TemporaryDirectory(prefix="mpillm-load-") as folder:
            _compare(dataclasses.replace(engine, tp_size=tp_size), Path(folder) / "engine", config.repeats)
    return 0


def _compare(config: EngineConfig, engine: Path, repeats: int) -> None:
    check_model(config)
    from mpillm.engine.build_engine import build

    started = time.perf_counter()
    build(
        str(config.model_path), engine, config.tp_size, dtype=config.dtype, quantization=config.quantization
    )
    built_s = time.perf_counter() - started
    from_engine = dataclasses.replace(config, engine_dir=str(engine), dtype="auto", quantization="auto")
    contenders = {"checkpoint": config, "engine": from_engine}
    for contender in contenders.values():
        _measured(contender)  # brings the files into the page cache
    found: dict[str, list[Loaded]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, contender in contenders.items():
            found[name].append(_measured(contender))
    rows = {
        name: [
            [loaded.load_s for loaded in all_loaded],
            [loaded.first_s for loaded in all_loaded],
            [loaded.cpu_s for loaded in all_loaded],
            [(loaded.peak - loaded.imports) / _MIB for loaded in all_loaded],
        ]
        for name, all_loaded in found.items()
    }
    for name, columns in rows.items():
        cells = " ".join(
            f"{_spread(values, 0 if i == len(columns) - 1 else 2):>22}" for i, values in enumerate(columns)
        )
        print(f"  {config.tp_size:>2} {name:<10} {cells}")
    # Compare round by round: a noisy machine is noisy for both.
    pairs = zip(rows["engine"], rows["checkpoint"], strict=True)
    ratios = [statistics.median(ours / theirs for ours, theirs in zip(*pair, strict=True)) for pair in pairs]
    print(
        f"     {'ratio':<10} {' '.join(f'{ratio:>22.2f}' for ratio in ratios)}   (built in {built_s:.1f} s)",
        flush=True,
    )


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _measured(config: EngineConfig) -> Loaded:
    """Load in a new process, so that only this counts in its memory."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_load, args=(config, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(_DEADLINE_S):
            raise RuntimeError(f"loading {config.model_path} took more than {_DEADLINE_S:g} s")
        try:
            loaded: Loaded = receiver.recv()
        except EOFError:
            raise RuntimeError(f"the process that loads {config.model_path} ended without a result") from None
    finally:
        process.kill()
        process.join()
    return loaded


def _load(config: EngineConfig, sender: Connection[Loaded, None]) -> None:
    import torch

    from mpillm.engine.parallel.groups import Groups
    from mpillm.engine.run.worker import Worker
    from mpillm.engine.schedule.step import Span, Step

    torch.set_num_threads(config.n_threads)
    imports = _peak_bytes()
    started, cpu_before = time.perf_counter(), time.process_time()
    info = model_info(config)
    # Without the sums over the TP group, which change nothing about loading.
    worker = Worker.on_cpu(config, info, Groups(info.layout))
    load_s = time.perf_counter() - started
    with torch.inference_mode():
        worker.logits(Step([Span(0, 0, 1, 0, [1])], [0], [0]))
    first_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
    sender.send(Loaded(load_s, first_s, cpu_s, _peak_bytes(), imports))


def _peak_bytes() -> int:
    """Peak resident memory of this process; `getrusage` would include its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmHWM")
