"""Benchmarks: medians, and ratios to a baseline measured in the same minutes, printed as tables.

A benchmark is a file `bench_NAME.py` with its `Options`, DESCRIPTION and EPILOG for --help, and `main`;
`commands/bench.py` starts it, on ranks, too.
"""
