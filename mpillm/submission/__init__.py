"""The wing for what MLCommons asks of a submission, made from run directories: rules, scores, tests, files.

It imports the core of mpillm; the core does not import it, but finds here by name what it brings
(`core_names.PLUGIN_PACKAGES`). So this file imports nothing. `commands/`: one file for each of its commands.
"""

COMMANDS = {
    "accuracy": "score the answers of an accuracy run",
    "compliance": "check a run of a compliance test: TEST06, TEST07, TEST09",
    "submission": "arrange runs as a submission to MLPerf Inference",
    "endpoints-submission": "measure a curve at fixed concurrency, for a submission to MLPerf Endpoints",
}
"""Each is the `main` of a file in `commands/`."""

GROUPS = {"submit": (*COMMANDS,)}
"""Where --help shows them."""
