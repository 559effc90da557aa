"""Launchers: mpirun command lines, environments of ranks, child processes, servers. Imports only `disagg`."""
