"""What stays: run directories and submissions."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.parsers import boolean, not_negative


class OutputFields(Options):
    """What stays: run directories and submissions."""

    log_dir = Field(
        "log_dir", "the run directory [default: build/runs/<time>-<model>-<scenario>]", group="output"
    )
    save_outputs = Field(
        "save_outputs", "write every answer to outputs.jsonl", boolean, default=False, group="output"
    )
    price_per_gpu_hour = Field(
        "price_per_gpu_hour",
        "what a GPU costs per hour: the page then says what a million tokens cost",
        not_negative,
        group="output",
    )
    submitter = Field("submitter", "who submits", group="submission")
    division = Field(
        "division",
        "the submission's division",
        default="closed",
        choices=("closed", "open"),
        group="submission",
    )
    output = Field("output", "the file or folder to write", group="submission")
