"""A workload is one declaration: every room takes what it needs from the record."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from mpillm.engine.shape.families.known import MODEL_TYPES
from mpillm.submission.scores import METRICS
from mpillm.workloads import TARGETS, WORKLOADS
from mpillm.workloads.workload import Metric

ROOT = Path(__file__).parents[3]

# In a process of its own: names of options and members of Benchmark are made when their modules are imported.
DECLARED = """
import json, sys
from dataclasses import replace
from pathlib import Path
from mpillm.workloads import benchmarks
from mpillm.workloads.workload import Accuracy, Columns, LatencyLimits, Submission, Workload

new = Workload(
    name="new-7b", aliases=("new",), members=("NEW_7B",), loadgen_model="new_7b", hf_model="someone/New-7B",
    architecture="LlamaForCausalLM",
    model_path="build/models/New-7B", tensor_parallelism=4, dataset_path="build/preprocessed_data/new",
    frame_file="new.pkl", columns=Columns("ids", references=("gt_output", "metric")), n_samples=5120,
    max_input_len=320, max_output_len=128, end_ids=(7,), min_output_len=2,
    accuracy=Accuracy("long_context", {"rougeL": 50.0}, "tokens_per_sample", (10.0, 20.0)),
    submission=Submission(
        {"v6.1": ("new-7b-99",)},
        LatencyLimits(1, 2, 3),
        (("Offline",), ("Server", "Interactive")),
        two_targets=True,
    ),
    tiny_model="tiny-llama", tiny_divisor=10,
)
benchmarks.WORKLOADS.update({new.name: new, new.interactive().name: new.interactive()})

folder = Path(sys.argv[1])
"""

CONSUMERS = {
    "options": """
from mpillm.options.options import parse_run
config = parse_run(["--benchmarks", "NEW-99.9"])
assert config.workload == new and config.accuracy_target == 0.999
assert (config.model_path, config.dataset_path) == (new.model_path, new.dataset_path)
assert (config.max_seq_len, config.max_output_len, config.min_output_len) == (448, 128, 2)
assert (config.end_ids, config.tensor_parallelism, config.where("end_ids")) == ((7,), 4, "workload new-7b")
assert parse_run(["--benchmarks", "new", "--scenarios", "Interactive"]).benchmarks == ("new-7b-interactive",)
assert parse_run(["--benchmarks", "new", "--gpu_batch_size", "new:96"]).max_batch_size == 96
""",
    "help": """
from tools.options_page import options_page
assert "new-7b, new-7b-interactive" in options_page()
""",
    "configuration files": """
from mpillm.options.options import parse_run
file = folder / "mine.py"
file.write_text('''from mpillm.user_config import *
@ConfigRegistry.register(HarnessType.Custom)
class Mine(OfflineGPUBaseConfig):
    benchmark = Benchmark.NEW_7B
    gpu_batch_size = {"new": 64}
''')
config = parse_run(["--config_file", str(file)])
assert config.benchmarks == ("new-7b",) and config.max_batch_size == 64
""",
    "NVIDIA's configuration files": """
from mpillm.options.options import parse_run
file = folder / "configs" / "H200x8" / "Offline" / "new-7b.py"
file.parent.mkdir(parents=True)
(folder / "code").mkdir()
file.write_text('''import code.common.constants as C
import code.fields.harness as harness_fields
EXPORTS = {C.WorkloadSetting(C.HarnessType.Custom, C.AccuracyTarget(0.99), C.PowerSetting.MaxP): {
    harness_fields.tensor_parallelism: 2,
}}
''')
assert parse_run(["--config_file", str(file)]).benchmarks == ("new-7b",)
""",
    "data sets": """
from mpillm import workloads
from mpillm.data.preprocessed.loader import loader_of
from mpillm.data.tiny_dataset import write_dataset
from mpillm.submission.references import read_references
tiny = workloads.get("new-7b", "tiny")
assert (tiny.model_path, tiny.n_samples, tiny.max_input_len, tiny.max_output_len) == ("tiny-llama", 10, 32, 2)
write_dataset(tiny, folder)
assert len(loader_of(folder, tiny).load().lengths) == 10
references = read_references(tiny, str(folder / "references.jsonl"))
assert [set(row) for row in references] == [{"gt_output", "metric"}] * 10
""",
    "LoadGen": """
from mpillm.options.options import parse_run
from mpillm.loadgen.settings import LoadGenConfig
assert LoadGenConfig.from_run(parse_run(["--benchmarks", "new-interactive"])).model == "new_7b-interactive"
tiny = LoadGenConfig.from_run(parse_run(["--benchmarks", "new", "--model_scale", "tiny"]))
assert tiny.scaled["performance_sample_count_override"] == 10
""",
    "submission": """
from mpillm.submission.rules import missing_scenarios, place
from mpillm.submission.scores import METRICS, ScoredResponse, check
assert place(new, 0.999, "Server") == ("new-7b-99.9", "Server")
assert place(new.interactive(), 0.99, "Server") == ("new-7b-99", "Interactive")
assert missing_scenarios(new, {"Offline"}) == ["one of Server and Interactive"]
scores = METRICS[new.accuracy.metric]([ScoredResponse("a b", 12)], [{"gt_output": "a b", "metric": "rouge"}])
assert all(c.passed for c in check(new.accuracy, scores.values, 0.99)), scores
""",
}


def test_every_room_takes_a_workload_that_is_declared_in_one_place(tmp_path: Path) -> None:
    parts = [
        f"folder = Path(sys.argv[1]) / {name!r}; folder.mkdir()\n{code}" for name, code in CONSUMERS.items()
    ]
    script = "\n".join([DECLARED, *parts])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_no_other_room_names_a_workload() -> None:
    """Only benchmarks do, which measure with some of them."""
    names = {
        name + target
        for w in WORKLOADS.values()
        for name in (w.name, *w.aliases)
        for target in ("", *TARGETS)
    }
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in sorted((ROOT / "mpillm").rglob("*.py"))
        if path.parent.name not in ("workloads", "bench", "table")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names and node.value not in MODEL_TYPES
    ]
    assert found == []


def test_every_metric_has_its_function() -> None:
    assert set(METRICS) == set(get_args(Metric))
