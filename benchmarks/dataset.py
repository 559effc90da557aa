"""``benchmarks dataset``: time and memory to load a preprocessed data set, each time in a new process.

A data frame is loaded twice: the first load converts it to arrays, later ones map these.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from disagg.errors import ConfigError
from mpillm import workloads
from mpillm.options.field import Field
from mpillm.options.fields.data import DataFields
from mpillm.options.parsers import positive
from mpillm.options.values import Values

_DEADLINE_S = 600.0


class Options(Values):
    """Options of ``benchmarks dataset``."""

    num_samples = DataFields.num_samples.but("samples of the data set", default=24576, group="benchmark")
    repeats = Field("repeats", "loads; the median is printed", positive, default=3, group="benchmark")
    dataset_path = Field(
        "dataset_path",
        "an existing data set of llama2-70b [default: two synthetic ones, arrays and a data frame]",
        group="benchmark",
    )


# Resident memory includes the pages of mapped files, so the frame's own file counts.
_LOAD = """
import json, pathlib, sys, time
from mpillm import workloads
from mpillm.data.dataset import PromptLimits, load_dataset
from mpillm.data.preprocessed.loader import loader_of
from mpillm.data.tokenizer import ByteTokenizer
def peak(): return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
path = pathlib.Path(sys.argv[1])
workload = workloads.get("llama2-70b")
began = time.perf_counter()
for file in [path] if path.is_file() else path.iterdir():
    with file.open("rb", buffering=0) as stream:
        buffer = bytearray(1 << 20)
        while stream.readinto(buffer): pass
read_s = time.perf_counter() - began
before, began, cpu = peak(), time.perf_counter(), time.process_time()
dataset = load_dataset(loader_of(path, workload), ByteTokenizer(), PromptLimits(32000, 2048, 1024))
took = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "bytes": peak() - before}
print(json.dumps(took | {"read_s": read_s, "samples": len(dataset), "tokens": len(dataset.tokens)}))
"""


DESCRIPTION = (
    "Load llama2-70b's data set in both published formats; a data frame twice:"
    " converting it to arrays, and mapping these."
)
EPILOG = "example:\n  python -m benchmarks dataset --repeats 5"


def main(config: Options) -> int:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as directory:
        folder = Path(directory)
        if config.dataset_path:
            # A link, to keep the arrays out of the data set's folder.
            paths = [folder / Path(config.dataset_path).name]
            paths[0].symlink_to(Path(config.dataset_path).resolve())
        else:
            paths = _make(folder, config.num_samples)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # hide earlier conversions
        print("median seconds (CPU time), and for reading alone; peak memory, and its ratio to the files")
        for path in paths:
            size = (
                path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())
            )
            again = path.with_name(f"{path.name}.arrays")
            loads = []
            for _ in range(config.repeats):
                shutil.rmtree(again, ignore_errors=True)
                loads.append((_load(path), _load(path)) if path.is_file() else (_load(path),))
            one = loads[0][0]
            print(f"  {path.name}: {one['samples']} samples, {one['tokens']} tokens, {size / 1e6:.1f} MB")
            for name, which in zip(
                ("first load", "later load") if path.is_file() else ("load",),
                zip(*loads, strict=True),
                strict=True,
            ):
                s, cpu_s, read_s, n_bytes = (
                    statistics.median(load[key] for load in which)
                    for key in ("s", "cpu_s", "read_s", "bytes")
                )
                print(
                    f"    {name}: {s:.2f} s ({cpu_s:.2f}), reading alone {read_s:.2f} s;"
                    f" {n_bytes / 1e6:.1f} MB, {n_bytes / size:.2f} of the files"
                )
    return 0


def _load(path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(path)],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"loading {path} failed:\n{done.stderr}")
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def _make(folder: Path, n: int) -> list[Path]:
    """Make `n` samples in both formats, with lengths and texts of about OpenOrca's size."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("benchmarks dataset needs pandas: pip install 'mpillm[datasets]'") from error
    random = np.random.default_rng(0)
    workload = workloads.get("llama2-70b")
    width = workload.max_input_len

    def rows() -> list[np.ndarray[Any, np.dtype[np.int32]]]:
        lengths = np.clip(random.normal(294, 200, n), 20, width).astype(int)
        return [
            np.minimum(random.exponential(3000, length), 31999).astype(np.int32)
            for length in lengths.tolist()
        ]

    inputs, outputs = rows(), rows()
    arrays = folder / "arrays"
    arrays.mkdir()
    padded = np.full((n, width), 2, np.int32)
    for i, row in enumerate(inputs):
        padded[i, : len(row)] = row
    lengths = np.array([len(row) for row in inputs], np.int32)
    np.save(arrays / "input_ids_padded.npy", padded)
    np.save(arrays / "input_lens.npy", lengths)
    text = ["".join(map(chr, 97 + row % 26)) * 4 for row in inputs]
    columns = {
        "id": [f"flan.{i}" for i in range(n)],
        "question": text,
        "input": [f"{one}." for one in text],
        "output": ["".join(map(chr, 97 + row % 26)) * 4 for row in outputs],
        "tok_input": [row.tolist() for row in inputs],
        "tok_output": [row.tolist() for row in outputs],
        "tok_input_length": lengths.astype(np.int64),
    }
    frame = folder / workload.frame_file
    pandas.DataFrame(
        {
            name: pandas.Series(values, dtype=getattr(values, "dtype", object))
            for name, values in columns.items()
        }
    ).to_pickle(frame)
    return [arrays, frame]
