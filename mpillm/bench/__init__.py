"""Benchmarks: medians and ratios against a baseline of the same minute, printed as tables.

A benchmark is a file `bench_NAME.py` with its `Options`, DESCRIPTION and EPILOG for --help, and `main`; `commands/bench.py` starts it, on
ranks too. Imports every room but submission and run.
"""
