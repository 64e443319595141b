#!/usr/bin/env bash
# Several machines: print the torchrun line for each of them. Starts nothing.
#
#   ./launch_multinode_ddp.sh
#   NNODES=4 NPROC_PER_NODE=8 MASTER_ADDR=node0 ./launch_multinode_ddp.sh train_ddp.py --epochs 3
set -euo pipefail

nnodes=${NNODES:-2}
nproc_per_node=${NPROC_PER_NODE:-4}
master_addr=${MASTER_ADDR:-10.0.0.1}
master_port=${MASTER_PORT:-29500}

if (( $# == 0 )); then
  set -- train_ddp.py --epochs 3 --batch-size 128 --lr 0.001
fi
script=$(printf ' %q' "$@")

cat <<TEXT
# $nnodes nodes x $nproc_per_node processes = world size $(( nnodes * nproc_per_node )).
# Before: this folder, the data and the same torch on every node; $master_addr:$master_port reachable from all of them, and
# the ports open between them that NCCL or gloo will choose. torchrun uses no SSH: you or a scheduler type the lines.

# Static rendezvous: you number the nodes. One line per node, in any order.
TEXT
for (( node = 0; node < nnodes; node++ )); do
  cat <<TEXT

# on node $node:
torchrun --nnodes=$nnodes --nproc_per_node=$nproc_per_node --node_rank=$node --master_addr=$master_addr --master_port=$master_port$script
TEXT
done

cat <<TEXT

# c10d rendezvous: the nodes number themselves. The same line on every node; the one that owns $master_addr hosts the store.

# on every node:
torchrun --nnodes=$nnodes --nproc_per_node=$nproc_per_node --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=$master_addr:$master_port$script
TEXT
