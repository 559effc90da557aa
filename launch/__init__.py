"""Launchers: mpirun command lines, ranks' environments, child processes, servers. Imports only `disagg`."""
