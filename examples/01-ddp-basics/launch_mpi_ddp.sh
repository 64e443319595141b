#!/usr/bin/env bash
# mpirun instead of torchrun, for a plain script: mpirun starts the processes, gloo or nccl moves the data.
#
#   ./launch_mpi_ddp.sh                              train_ddp.py with its defaults
#   ./launch_mpi_ddp.sh ddp_training.py --epochs 5   another script, with its options
#   NPROC_PER_NODE=4 ./launch_mpi_ddp.sh             a number of your own
#
# On several machines: export MASTER_ADDR=<host of rank 0>, then mpirun --hostfile hosts -x MASTER_ADDR ./launch_mpi_ddp.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if (( $# == 0 )); then
  set -- train_ddp.py
fi

# Each MPI passes the rank of a process in variables of its own, and torch reads torchrun's.
if [[ -n ${OMPI_COMM_WORLD_RANK:-} ]]; then  # Open MPI
  export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE
  export LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE
elif [[ -n ${PMI_RANK:-} ]]; then  # MPICH and Intel MPI
  export RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE LOCAL_RANK=$MPI_LOCALRANKID LOCAL_WORLD_SIZE=$MPI_LOCALNRANKS
else  # nobody has started us yet
  exec mpirun -n "${NPROC_PER_NODE:-2}" "./$(basename "$0")" "$@"
fi
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
exec python "$@"
