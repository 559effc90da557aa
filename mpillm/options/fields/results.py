"""Results: run directories and submissions."""

from __future__ import annotations

from launch.default_paths import RUNS
from mpillm.options.field import Options, option
from mpillm.options.fields.effects import OF_OWN_LOADS, SUBMITTED, TIME
from mpillm.options.parsers import boolean, not_negative


class OutputFields(Options, group="output"):
    """Results: run directories and submissions."""

    log_dir = option(f"the run directory [default: {RUNS}/<time>-<model>-<scenario>]")
    save_outputs = option("write every answer to outputs.jsonl", boolean, default=False, effect=OF_OWN_LOADS)
    requests_file = option(
        "write a table with a row for each request: a .csv, or a .parquet (needs pyarrow)",
        effect=OF_OWN_LOADS,
    )
    price_per_gpu_hour = option(
        "price of a GPU per hour; the HTML report then shows the price of a million tokens",
        not_negative,
        effect=TIME,
    )
    submitter = option("the submitting organization", effect=SUBMITTED, group="submission")
    division = option(
        "the submission's division",
        default="closed",
        choices=("closed", "open"),
        effect=SUBMITTED,
        group="submission",
    )
    output = option("the file or folder to write", effect=SUBMITTED, group="submission")
