"""The laboratory: what mpillm's makers measure, each beside a baseline of the same run.

A benchmark is a file with its `Options`, DESCRIPTION and EPILOG for --help, and `main`; `command.py` lists
them. They are not installed: `python -m benchmarks NAME` runs one in a clone. `notes/` has figures, with
machines and days.
What users measure on a machine of theirs is `python -m mpillm bench`.
"""
