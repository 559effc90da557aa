"""One file for each command of ``python -m mpillm``: its options, and what it calls. Imports every other room; only `cli` imports it.

`mpirun` is the one command that is not here: it is in `launch`, which imports nothing of mpillm.
"""
