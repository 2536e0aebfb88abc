#!/usr/bin/env bash
# Train a small GPT on the CPUs of one machine, in two pipeline stages.
#
#   examples/gpt3/laptop.sh                           synthetic data
#   DATA_PATH=data/text examples/gpt3/laptop.sh       data made by tools/prepare_text.py
#   SPLIT=1,0,0 EVAL_ITERS=0 DATA_PATH=data/few ...   too few documents to hold some out
#   SAVE=checkpoints SAVE_INTERVAL=10 ...             save, and go on from there the next time
#   DATA_PARALLEL_SIZE=2 ... --num-experts 4 --swiglu --disable-bias-linear \
#       --expert-model-parallel-size 2                experts, on two ranks a stage
#   DRY_RUN=1 examples/gpt3/laptop.sh                 print the command and stop
#
# Every variable below can be set in the environment; further arguments go to pretrain_gpt.py and
# win over those given here.
set -euo pipefail

# It stays in the caller's directory, so that relative paths are the caller's.
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
OURS=$REPOSITORY/.venv/bin/python

PYTHON=${PYTHON:-$([[ -x $OURS ]] && echo "$OURS" || echo python)}
DATA_PATH=${DATA_PATH:-}
SAVE=${SAVE:-}
PIPELINE_SCHEDULE=${PIPELINE_SCHEDULE:-zb-h1}
PIPELINE_SIZE=${PIPELINE_SIZE:-2}
TENSOR_SIZE=${TENSOR_SIZE:-1}
CONTEXT_PARALLEL_SIZE=${CONTEXT_PARALLEL_SIZE:-1}
DATA_PARALLEL_SIZE=${DATA_PARALLEL_SIZE:-1}
NUM_LAYERS=${NUM_LAYERS:-4}
HIDDEN_SIZE=${HIDDEN_SIZE:-64}
NUM_HEADS=${NUM_HEADS:-4}
SEQ_LENGTH=${SEQ_LENGTH:-64}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-2}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-16}
TRAIN_ITERS=${TRAIN_ITERS:-20}
EVAL_ITERS=${EVAL_ITERS:-1}
LR=${LR:-1e-3}
SPLIT=${SPLIT:-90,5,5}
SAVE_INTERVAL=${SAVE_INTERVAL:-$TRAIN_ITERS}
DRY_RUN=${DRY_RUN:-0}

die() {
    echo "$0: $*" >&2
    exit 2
}
NUMBERS=(PIPELINE_SIZE TENSOR_SIZE CONTEXT_PARALLEL_SIZE DATA_PARALLEL_SIZE NUM_LAYERS HIDDEN_SIZE
    NUM_HEADS SEQ_LENGTH MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE TRAIN_ITERS SAVE_INTERVAL)
for name in "${NUMBERS[@]}"; do
    [[ ${!name} =~ ^[1-9][0-9]{0,8}$ ]] || die "$name=${!name}: it must be a whole number above 0"
done
[[ $EVAL_ITERS =~ ^(0|[1-9][0-9]{0,8})$ ]] || die "EVAL_ITERS=$EVAL_ITERS: it must be a whole number"
((GLOBAL_BATCH_SIZE % (MICRO_BATCH_SIZE * DATA_PARALLEL_SIZE) == 0)) ||
    die "GLOBAL_BATCH_SIZE=$GLOBAL_BATCH_SIZE: it must be a multiple of MICRO_BATCH_SIZE x" \
        "DATA_PARALLEL_SIZE, $((MICRO_BATCH_SIZE * DATA_PARALLEL_SIZE))"
[[ $DRY_RUN == [01] ]] || die "DRY_RUN=$DRY_RUN: use 0 or 1"
[[ $DRY_RUN == 1 || -z $SAVE ]] || { mkdir -p "$SAVE" && [[ -w $SAVE ]]; } ||
    die "SAVE=$SAVE: no checkpoint can be written there"

# CPU mode sets the flags that only a GPU could honour; one thread a stage, or they fight.
export ZERO_BUBBLE_DEVICE=${ZERO_BUBBLE_DEVICE:-cpu}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# 257 is 256 bytes and the end of a document, as tools/prepare_text.py writes them.
DATA=(--tokenizer-type NullTokenizer --vocab-size 257 --split "$SPLIT")
if [[ -n $DATA_PATH ]]; then
    DATA+=(--data-path "$DATA_PATH")
else
    DATA+=(--mock-data)
fi

CHECKPOINT=()
if [[ -n $SAVE ]]; then
    CHECKPOINT+=(--save "$SAVE" --load "$SAVE" --save-interval "$SAVE_INTERVAL")
    # A later run may have another TRAIN_ITERS than the checkpoint.
    CHECKPOINT+=(--override-opt-param-scheduler)
fi

RANKS=$((PIPELINE_SIZE * TENSOR_SIZE * CONTEXT_PARALLEL_SIZE * DATA_PARALLEL_SIZE))
COMMAND=(
    "$PYTHON" -m torch.distributed.run
    --standalone
    --nproc-per-node "$RANKS"
    "$REPOSITORY/pretrain_gpt.py"
    --pipeline-schedule "$PIPELINE_SCHEDULE"
    --pipeline-model-parallel-size "$PIPELINE_SIZE"
    --tensor-model-parallel-size "$TENSOR_SIZE"
    --context-parallel-size "$CONTEXT_PARALLEL_SIZE"
    --num-layers "$NUM_LAYERS"
    --hidden-size "$HIDDEN_SIZE"
    --num-attention-heads "$NUM_HEADS"
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --eval-iters "$EVAL_ITERS"
    --eval-interval "$TRAIN_ITERS"
    --lr "$LR"
    --lr-decay-style constant
    --log-interval 1
    "${DATA[@]}"
    "${CHECKPOINT[@]}"
    "$@"
)

if [[ $DRY_RUN == 1 ]]; then
    printf '%q ' "${COMMAND[@]}"
    echo
    exit
fi
exec "${COMMAND[@]}"
