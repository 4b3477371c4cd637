#!/bin/bash
# Asynchronous RL on a Ray cluster, from anywhere that reaches its dashboard:
#   SHARED=/shared bash examples/cluster/ray.sh http://HEAD:8265
# etude and Ray are installed on all machines. SHARED is a folder that they see under the same path, with a checkpoint
# of SFT in it. With --resume in front of the address it continues a run.
set -eu
SHARED=${SHARED:?a folder that all machines of the cluster share}
CHECKPOINT=${CHECKPOINT:-$SHARED/sft} OUT=${OUT:-$SHARED/runs/async} WORKERS=${WORKERS:-16}

resume=()
if [ "${1:-}" = --resume ]; then
    resume=(--resume)
    shift
fi
exec ray job submit --address "${1:?address of the dashboard, http://HEAD:8265}" -- \
    etude run async-rl --runtime ray --out "$OUT" --set "workers=$WORKERS" --set "checkpoint=$CHECKPOINT" \
    ${resume[@]+"${resume[@]}"}
