"""What a user measures of a part: medians, and ratios to a baseline of the same minutes.

A benchmark is a file `bench_NAME.py` with its `Options`, DESCRIPTION and EPILOG for --help, and `main`;
`commands/bench.py` starts it. Those of mpillm's makers are in `benchmarks/`, which is not installed.
"""
