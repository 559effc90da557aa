"""Benchmarks of parts for users: medians, and ratios to a baseline that runs alternately.

A benchmark is a file `bench_NAME.py` with its `Options`, DESCRIPTION and EPILOG for --help, and `main`.
`commands/bench.py` starts it. Benchmarks for developers are in `benchmarks/`, which is not installed.
"""
