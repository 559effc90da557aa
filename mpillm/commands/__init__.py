"""One file per command of ``python -m mpillm``, with its options. Only `cli` imports them.

The command `mpirun` is in `launch`, which imports nothing from mpillm.
"""
