#!/usr/bin/env bash
# Train the zero-bubble paper's GPT of 28.3 billion parameters: 32 stages, 4 nodes of 8 GPUs.
#
#   MASTER_ADDR=node0 NODE_RANK=0 examples/gpt3/28.3b.sh
#                                               on each of the 4 nodes, with its rank
#   srun --nodes 4 --ntasks-per-node 8 examples/gpt3/28.3b.sh
#                                               in an allocation of Slurm's; or see
#                                               slurm_many_nodes.sh
#   DRY_RUN=1 examples/gpt3/28.3b.sh           print the command and stop
#
# These are the paper's sizes; each can be set in the environment, as can what launch.sh lists.
# Further arguments go to pretrain_gpt.py and win over those given here.
set -euo pipefail

NUM_LAYERS=${NUM_LAYERS:-62}
HIDDEN_SIZE=${HIDDEN_SIZE:-6144}
NUM_HEADS=${NUM_HEADS:-48}
SEQ_LENGTH=${SEQ_LENGTH:-1024}
PIPELINE_SIZE=${PIPELINE_SIZE:-32}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
NUM_MICROBATCHES=${NUM_MICROBATCHES:-96} # in a batch, for each replica; the paper: 96, 128 and 256
LR=${LR:-8e-5}

# shellcheck source-path=SCRIPTDIR source=launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch "$@"
