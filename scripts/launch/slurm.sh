#!/usr/bin/env bash
# A Slurm job on several machines, which resumes when its time is up, a machine fails or the job is preempted:
#
#     sbatch scripts/launch/slurm.sh -m hf_vanilla.scripts.train_translation --stop_grace 120 ...
#
#SBATCH --job-name=hf_vanilla
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
set -euo pipefail

export NODES=$SLURM_JOB_NUM_NODES
export GRACE=${GRACE:-150}  # below the 180 s above, and above --stop_grace
export JOB=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HEAD=${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 10000))

time_is_up=
trap 'time_is_up=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

# Slurm runs a copy of this file, so the path of the other one begins in the folder where sbatch was called.
srun --kill-on-bad-exit=1 bash scripts/launch/torchrun.sh "$@" &
step=$!
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do  # the signal has ended the wait
    code=0
    wait "$step" || code=$?
done
if [ -n "$time_is_up" ] && [ "$code" != 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
