"""Plugin package for submissions to MLCommons from run directories: rules, scores, tests, files.

It imports mpillm's main packages. They do not import it, but read this file by name
(`core_names.PLUGIN_PACKAGES`), so it imports nothing. `commands/` has one file for each command.
"""

COMMANDS = {
    "accuracy": "score the answers of an accuracy run",
    "compliance": "check a run of a compliance test: TEST06, TEST07, TEST09",
    "submission": "arrange runs as a submission to MLPerf Inference",
    "endpoints-submission": "measure a curve at fixed concurrency, for a submission to MLPerf Endpoints",
    "agentic-submission": "measure a curve of agentic points, for a submission to MLPerf Endpoints",
}
"""Commands, each the `main` of a file in `commands/`."""

GROUPS = {"submit": (*COMMANDS,)}
"""Groups of the commands in --help."""
