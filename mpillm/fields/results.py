"""What stays: run directories and submissions."""

from __future__ import annotations

from launch.places import RUNS
from mpillm.configurator import Field, Options
from mpillm.configurator.parsers import boolean, not_negative
from mpillm.fields.effects import REPORTED, SUBMITTED


class OutputFields(Options):
    """What stays: run directories and submissions."""

    log_dir = Field(
        "log_dir", f"the run directory [default: {RUNS}/<time>-<model>-<scenario>]", group="output"
    )
    save_outputs = Field(
        "save_outputs",
        "write every answer to outputs.jsonl",
        boolean,
        default=False,
        effect=REPORTED,
        group="output",
    )
    price_per_gpu_hour = Field(
        "price_per_gpu_hour",
        "what a GPU costs per hour: the page then says what a million tokens cost",
        not_negative,
        effect=REPORTED,
        group="output",
    )
    submitter = Field("submitter", "who submits", effect=SUBMITTED, group="submission")
    division = Field(
        "division",
        "the submission's division",
        default="closed",
        choices=("closed", "open"),
        effect=SUBMITTED,
        group="submission",
    )
    output = Field("output", "the file or folder to write", effect=SUBMITTED, group="submission")
