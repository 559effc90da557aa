"""One file per command of ``python -m mpillm``: its options, and what it calls. Only `cli` imports them.

The command `mpirun` is in `launch`, which imports nothing of mpillm.
"""
