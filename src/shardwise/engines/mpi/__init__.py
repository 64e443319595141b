"""MPI as a collective backend: a process group of torch over mpi4py."""
