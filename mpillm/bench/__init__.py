"""Benchmarks that a user runs: medians, and ratios to a baseline measured in the same minutes, as tables.

A benchmark is a file `bench_NAME.py` with its `Options`, DESCRIPTION and EPILOG for --help, and `main`;
`commands/bench.py` starts it. Those of mpillm's makers are in `benchmarks/`, which is not installed.
"""
