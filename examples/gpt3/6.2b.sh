#!/usr/bin/env bash
# Train the zero-bubble paper's GPT of 6.2 billion parameters: 8 stages, one node of 8 GPUs.
#
#   examples/gpt3/6.2b.sh                            synthetic data, on this node's 8 GPUs
#   PIPELINE_SCHEDULE=auto examples/gpt3/6.2b.sh     measure, then the best schedule that fits
#   srun --ntasks-per-node 8 examples/gpt3/6.2b.sh   in an allocation of Slurm's; or see
#                                                   slurm_one_node.sh
#   DRY_RUN=1 examples/gpt3/6.2b.sh                  print the command and stop
#
# These are the paper's sizes; each can be set in the environment, as can what launch.sh lists.
# Further arguments go to pretrain_gpt.py and win over those given here.
set -euo pipefail

NUM_LAYERS=${NUM_LAYERS:-30}
HIDDEN_SIZE=${HIDDEN_SIZE:-4096}
NUM_HEADS=${NUM_HEADS:-32}
SEQ_LENGTH=${SEQ_LENGTH:-1024}
PIPELINE_SIZE=${PIPELINE_SIZE:-8}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-3}
NUM_MICROBATCHES=${NUM_MICROBATCHES:-24} # in a batch, for each replica; the paper: 24, 32 and 64
LR=${LR:-1.2e-4}

# shellcheck source-path=SCRIPTDIR source=launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch "$@"
