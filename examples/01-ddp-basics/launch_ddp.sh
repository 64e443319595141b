#!/usr/bin/env bash
# One machine: start a script with one process per GPU, or with two CPU processes where there is no GPU.
#
#   ./launch_ddp.sh                              train_ddp.py with its defaults
#   ./launch_ddp.sh ddp_training.py --epochs 5   another script, with its options
#   NPROC_PER_NODE=4 ./launch_ddp.sh             a number of your own
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Ask torch, not nvidia-smi: torch honours CUDA_VISIBLE_DEVICES.
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if (( gpus > 0 )); then
  processes=${NPROC_PER_NODE:-$gpus}
else
  processes=${NPROC_PER_NODE:-2}
fi

if (( $# == 0 )); then
  set -- train_ddp.py
fi

echo "GPUs: $gpus, so: torchrun --standalone --nproc_per_node=$processes $*"
# --standalone: rendezvous on this machine, on any free port.
exec torchrun --standalone --nproc_per_node="$processes" "$@"
