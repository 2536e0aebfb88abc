#!/usr/bin/env bash
# Slurm: train the paper's model of 28.3 billion parameters on 4 nodes of 8 GPUs, or another model.
#
#   sbatch examples/gpt3/slurm_many_nodes.sh                             28.3b, 32 stages
#   MODEL=14.6b sbatch --nodes 2 examples/gpt3/slurm_many_nodes.sh       16 stages
#   MODEL=6.2b sbatch examples/gpt3/slurm_many_nodes.sh                  8 stages, 4 replicas
#   DRY_RUN=1 examples/gpt3/slurm_many_nodes.sh                          print, without Slurm
#
# Submit it in the repository (or set REPOSITORY), with .venv built by `make setup` on a file system
# that all nodes see. Options on sbatch's command line win over those below; GPUs and tasks of a
# node are changed together. Nodes of A100 and H100 are alike to it.
#SBATCH --job-name=zero-bubble-nodes
#SBATCH --nodes=4
# One rank for each GPU.
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
# Name and number of the job; what comes after a restart is added.
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# To this shell (B), long enough before the end for an iteration and a checkpoint.
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
set -euo pipefail

# Slurm runs a copy of this file, which does not know where it came from.
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
REPOSITORY=${REPOSITORY:-${SLURM_SUBMIT_DIR:-$HERE}}
MODEL=${MODEL:-28.3b}
NODES=${SLURM_JOB_NUM_NODES:-4}
GPUS=${SLURM_NTASKS_PER_NODE:-8}

if [[ ! -f $REPOSITORY/examples/gpt3/slurm_job.sh ]]; then
    echo "$REPOSITORY is not the repository: submit in it, or set REPOSITORY" >&2
    exit 2
fi
# shellcheck source-path=SCRIPTDIR source=slurm_job.sh
source "$REPOSITORY/examples/gpt3/slurm_job.sh"
run_job "$MODEL" "$NODES" "$GPUS" "$@"
