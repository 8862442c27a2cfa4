#!/bin/bash
# One worker of oobleck.sbatch: worker.sh ENDPOINT KEYS LOCAL. Its name is that of the machine and its place on it.
set -u
node=$SLURMD_NODENAME-$SLURM_LOCALID
kind=cpu
[ -z "${SLURM_GPUS_ON_NODE:-}" ] || kind=cuda
daemon=${1#tcp://}
# OOBLECK_ADDRESS is the first machine's: here it is always the route's.
address=$("$(dirname "$0")/address.py" "${daemon%:*}")
# SIGTERM, which Slurm sends to all processes of the step, leaves the agent that long to move elsewhere what it holds, or into a checkpoint.
export OOBLECK_NOTICE_S=${OOBLECK_NOTICE_S:-90}

leave=
trap 'leave=1' TERM
while [ -z "$leave" ]; do
  oobleck-worker --node "$node" --daemon "$1" --keys-dir "$2" --bind "$address" --kind "$kind" --run-dir "$3/$node" &
  agent=$!
  # A signal ends a wait, and not the agent.
  code=0
  wait "$agent" || code=$?
  while kill -0 "$agent" 2>/dev/null; do
    code=0
    wait "$agent" || code=$?
  done
  # 0: it has left; 2 and 5: a configuration that cannot be used, or refused. Else it died, and starts again.
  case $code in 0 | 2 | 5) exit "$code" ;; esac
  [ -n "$leave" ] || sleep 2
done
