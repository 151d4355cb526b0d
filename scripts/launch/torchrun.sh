#!/usr/bin/env bash
# Starts a training in several processes, on one machine or on several, and restarts it when one of them dies.
# The arguments are torchrun's:
#
#     scripts/launch/torchrun.sh -m hf_vanilla.scripts.train_translation --train_source_file train.en ...
#
# Environment variables, with their defaults:
#     PROCESSES   processes on this machine: one for each GPU, or without GPUs one for each core
#     RESTARTS    how often the job may restart: 3
#     GRACE       seconds for saving after SIGTERM or Ctrl-C: 60 (with torch 2.11: 30 at most)
#     PYTHON      the interpreter: python
#     NODES       machines: 1. With several, each of them runs this script, with
#     HEAD        HOST or HOST:PORT, where HOST is one of the machines
#     JOB         a name that no other job with this HEAD has: hf_vanilla
#     JOIN        seconds to wait for the other machines: 600
#     ADDRESS     the address of this machine, where the others can't resolve its name
set -euo pipefail

# Otherwise a restarted job gets the TCPStore of the attempt before, with the addresses of dead processes in it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${GRACE:-60}

rendezvous=(--standalone)
if [ "${NODES:-1}" != 1 ]; then
    rendezvous=(
        --nnodes "$NODES" --rdzv-backend c10d --rdzv-id "${JOB:-hf_vanilla}"
        --rdzv-endpoint "${HEAD:?must be HOST or HOST:PORT of one of the machines}"
        --rdzv-conf "join_timeout=${JOIN:-600}"
    )
fi
exec "${PYTHON:-python}" -m torch.distributed.run "${rendezvous[@]}" ${ADDRESS:+--local-addr "$ADDRESS"} \
    --nproc-per-node "${PROCESSES:-auto}" --max-restarts "${RESTARTS:-3}" "$@"
