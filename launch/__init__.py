"""Starting things: mpirun lines, environments of ranks, child processes, servers. Imports only `disagg`."""
