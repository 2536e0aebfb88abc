# shellcheck shell=bash
# What the scripts of the paper's models share: Megatron's flags, and how ranks are started.
#
# It is sourced. The model's script sets sizes, then calls `launch "$@"`. Every variable below can
# be set in the environment; further arguments go to pretrain_gpt.py and win over those given here.

# It stays in the caller's directory, so that relative paths are the caller's.
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
OURS=$REPOSITORY/.venv/bin/python

PYTHON=${PYTHON:-$([[ -x $OURS ]] && echo "$OURS" || echo python)}
DRY_RUN=${DRY_RUN:-0}

# zb-h1 needs no more memory than 1F1B, and no measuring. `auto` starts as it, measures iterations 5
# to 10, and goes over to the best schedule that fits into memory: for a job of some hundred
# iterations or more.
PIPELINE_SCHEDULE=${PIPELINE_SCHEDULE:-zb-h1}
TENSOR_SIZE=${TENSOR_SIZE:-1}
# Above 1 on GPUs with Transformer Engine alone, whose attention it takes.
CONTEXT_SIZE=${CONTEXT_SIZE:-1}
# Schedules that split the backward pass have been run with Megatron's local layers. Those of
# Transformer Engine (transformer_engine; 2.8 or later) are split too, but have not been run yet.
TRANSFORMER_IMPL=${TRANSFORMER_IMPL:-local}
# 1 lets local layers use Apex's kernels, and accumulate weight gradients in the product itself.
FUSED=${FUSED:-0}
# With tensor parallelism: 1 spreads norms and dropout over the ranks as well, with no more to send.
# PyTorch's norms, which local layers have without Apex, cannot do that.
SEQUENCE_PARALLEL=${SEQUENCE_PARALLEL:-$([[ $TRANSFORMER_IMPL == local && $FUSED != 1 ]] && echo 0 || echo 1)}

DATA_PATH=${DATA_PATH:-}
TOKENIZER_TYPE=${TOKENIZER_TYPE:-HuggingFaceTokenizer}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-}
VOCAB_SIZE=${VOCAB_SIZE:-50257}
SPLIT=${SPLIT:-969,30,1}
TRAIN_ITERS=${TRAIN_ITERS:-1000}
EVAL_ITERS=${EVAL_ITERS:-10}
EVAL_INTERVAL=${EVAL_INTERVAL:-$TRAIN_ITERS}
LOG_INTERVAL=${LOG_INTERVAL:-10}
SAVE=${SAVE:-}
SAVE_INTERVAL=${SAVE_INTERVAL:-500}
# 1 saves and stops at SIGTERM. It asks all ranks in each iteration whether one has got it.
EXIT_SIGNAL_HANDLER=${EXIT_SIGNAL_HANDLER:-0}

# torchrun starts this node's ranks. srun has started this script as one of them.
LAUNCHER=${LAUNCHER:-auto}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-}
NODE_RANK=${NODE_RANK:-}
MASTER_ADDR=${MASTER_ADDR:-}
MASTER_PORT=${MASTER_PORT:-29500}

# Those of them that are numbers, and those that are 0 or 1.
NUMBERS=(PIPELINE_SIZE TENSOR_SIZE CONTEXT_SIZE GPUS_PER_NODE NUM_LAYERS HIDDEN_SIZE NUM_HEADS SEQ_LENGTH
    MICRO_BATCH_SIZE NUM_MICROBATCHES TRAIN_ITERS EVAL_INTERVAL LOG_INTERVAL SAVE_INTERVAL VOCAB_SIZE
    MASTER_PORT)
SWITCHES=(DRY_RUN FUSED SEQUENCE_PARALLEL EXIT_SIGNAL_HANDLER)

die() {
    echo "$0: $*" >&2
    exit 2
}

# Settings of CUDA and NCCL. What depends on a cluster's network (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)
# is left to its own configuration; what is exported already passes through.
set_environment() {
    # A node whose GPUs cannot be seen must stop, instead of training on its CPUs.
    export ZERO_BUBBLE_DEVICE=${ZERO_BUBBLE_DEVICE:-cuda}
    # Ranks share the cores of a node.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    if ((TENSOR_SIZE > 1 || CONTEXT_SIZE > 1)); then
        # One hardware queue: kernels start in the order of their launch, so that a reduction of
        # tensor parallelism is under way before the product it hides behind fills the chip.
        # Megatron insists on it, for GPUs before Blackwell.
        export CUDA_DEVICE_MAX_CONNECTIONS=1
    else
        # Each channel between stages has a stream. With more streams than queues (8 by default) one
        # that waits for its message would hold up another behind it.
        export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
    fi
    # The next stage waits for a message, nobody yet for the W that runs beside it: message first.
    export TORCH_NCCL_HIGH_PRIORITY=${TORCH_NCCL_HIGH_PRIORITY:-1}
    # Name what is wrong with the network, and say nothing else.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
}

check_variables() {
    local name
    for name in "${NUMBERS[@]}"; do
        [[ ${!name} =~ ^[1-9][0-9]{0,8}$ ]] ||
            die "$name=${!name}: it must be a whole number above 0"
    done
    ((MASTER_PORT < 65536)) || die "MASTER_PORT=$MASTER_PORT: ports go up to 65535"
    [[ $EVAL_ITERS =~ ^(0|[1-9][0-9]{0,8})$ ]] || die "EVAL_ITERS=$EVAL_ITERS: it must be a whole number"
    for name in "${SWITCHES[@]}"; do
        [[ ${!name} == [01] ]] || die "$name=${!name}: use 0 or 1"
    done
    replica=$((PIPELINE_SIZE * TENSOR_SIZE * CONTEXT_SIZE))
    : "${NNODES:=$(((replica + GPUS_PER_NODE - 1) / GPUS_PER_NODE))}"
    [[ $NNODES =~ ^[1-9][0-9]{0,8}$ ]] || die "NNODES=$NNODES: it must be a whole number above 0"
    [[ $DRY_RUN == 1 || -z $SAVE ]] || { mkdir -p "$SAVE" && [[ -w $SAVE ]]; } ||
        die "SAVE=$SAVE: no checkpoint can be written there"
}

# Sets `world`, and in `start` what comes before pretrain_gpt.py.
choose_launcher() {
    if [[ $LAUNCHER == auto ]]; then
        # An interactive shell of Slurm's is a step of one task.
        ((${SLURM_STEP_NUM_TASKS:-1} > 1)) && LAUNCHER=srun || LAUNCHER=torchrun
    fi
    case $LAUNCHER in
        srun)
            world=${SLURM_STEP_NUM_TASKS:?LAUNCHER=srun is for a script that srun has started}
            start=("$PYTHON")
            [[ -n $MASTER_ADDR ]] || MASTER_ADDR=$(first_host)
            export MASTER_ADDR MASTER_PORT WORLD_SIZE=$world
            export RANK=${SLURM_PROCID:-0} LOCAL_RANK=${SLURM_LOCALID:-0}
            ;;
        torchrun)
            world=$((NNODES * GPUS_PER_NODE))
            start=("$PYTHON" -m torch.distributed.run --nproc-per-node "$GPUS_PER_NODE")
            if ((NNODES == 1)); then
                start+=(--standalone)
            else
                if ((${SLURM_STEP_NUM_TASKS:-1} == NNODES)); then # a task of srun's on each node
                    NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
                    [[ -n $MASTER_ADDR ]] || MASTER_ADDR=$(first_host)
                elif [[ $DRY_RUN == 1 ]]; then # those of the first node
                    NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-$HOSTNAME}
                fi
                if [[ ! ${NODE_RANK:-0} =~ ^(0|[1-9][0-9]{0,8})$ ]] ||
                    ((${NODE_RANK:-0} >= NNODES)); then
                    die "NODE_RANK=$NODE_RANK: with $NNODES nodes it is 0 to $((NNODES - 1))"
                fi
                [[ -n $NODE_RANK && -n $MASTER_ADDR ]] ||
                    die "$NNODES nodes: run it on each of them with MASTER_ADDR=the first node's" \
                        "name and NODE_RANK=0 to $((NNODES - 1)), or let srun start it"
                start+=(--nnodes "$NNODES" --node-rank "$NODE_RANK")
                start+=(--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
            fi
            ;;
        *) die "LAUNCHER=$LAUNCHER: use torchrun, srun or auto" ;;
    esac
}

first_host() {
    local hosts
    # Those of the step, where it has not got all of the job's.
    hosts=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:?}}") ||
        die "scontrol does not say which hosts the job has: set MASTER_ADDR to the first one"
    echo "${hosts%%$'\n'*}"
}

launch() {
    local world start replica replicas layers command
    check_variables
    choose_launcher
    replicas=$((world / replica))
    ((replicas >= 1 && world % replica == 0)) ||
        die "$world ranks are no multiple of PIPELINE_SIZE $PIPELINE_SIZE x TENSOR_SIZE" \
            "$TENSOR_SIZE x CONTEXT_SIZE $CONTEXT_SIZE: start $replica ranks, or a multiple of that"
    set_environment

    layers=(--num-layers "$NUM_LAYERS")
    # Megatron's own schedules need to be told that the ends of the model have a layer less; ours
    # spread layers like that by themselves.
    if ((NUM_LAYERS % PIPELINE_SIZE && (NUM_LAYERS + 2) % PIPELINE_SIZE == 0)); then
        layers+=(--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split)
    fi
    command=(
        "${start[@]}"
        "$REPOSITORY/pretrain_gpt.py"
        --pipeline-schedule "$PIPELINE_SCHEDULE"
        --pipeline-model-parallel-size "$PIPELINE_SIZE"
        --tensor-model-parallel-size "$TENSOR_SIZE"
        --context-parallel-size "$CONTEXT_SIZE"
        --transformer-impl "$TRANSFORMER_IMPL"
        "${layers[@]}"
        --hidden-size "$HIDDEN_SIZE"
        --num-attention-heads "$NUM_HEADS"
        --seq-length "$SEQ_LENGTH"
        --max-position-embeddings "$SEQ_LENGTH"
        --micro-batch-size "$MICRO_BATCH_SIZE"
        --global-batch-size $((MICRO_BATCH_SIZE * NUM_MICROBATCHES * replicas))
        --train-iters "$TRAIN_ITERS"
        --eval-iters "$EVAL_ITERS"
        --eval-interval "$EVAL_INTERVAL"
        --bf16
        --lr "$LR"
        --lr-decay-style cosine
        --lr-warmup-fraction 0.01
        --weight-decay 0.1
        --adam-beta2 0.95
        --log-interval "$LOG_INTERVAL"
        --log-throughput
    )
    add_data
    add_parallelism
    add_kernels
    add_checkpoints
    command+=("$@")
    run_or_print
}

# The following add to launch's `command`.

add_data() {
    command+=(--split "$SPLIT")
    if [[ -n $TOKENIZER_MODEL ]]; then
        command+=(--tokenizer-type "$TOKENIZER_TYPE" --tokenizer-model "$TOKENIZER_MODEL")
    else
        command+=(--tokenizer-type NullTokenizer --vocab-size "$VOCAB_SIZE")
    fi
    if [[ -n $DATA_PATH ]]; then
        command+=(--data-path "$DATA_PATH")
    else
        command+=(--mock-data)
    fi
}

add_parallelism() {
    ((TENSOR_SIZE == 1 || SEQUENCE_PARALLEL == 0)) || command+=(--sequence-parallel)
    # Between replicas: optimizer states spread out; gradients reduced behind the last W's,
    # parameters gathered behind the first F's.
    ((replicas == 1)) ||
        command+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
}

add_kernels() {
    # Without Apex none of the three works, and local layers take PyTorch's kernels.
    [[ $TRANSFORMER_IMPL != local || $FUSED == 1 ]] || command+=(
        --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    )
}

add_checkpoints() {
    [[ $EXIT_SIGNAL_HANDLER != 1 ]] || command+=(--exit-signal-handler)
    [[ -n $SAVE ]] || return 0
    command+=(--save "$SAVE" --load "$SAVE" --save-interval "$SAVE_INTERVAL")
    # A later run may have another TRAIN_ITERS than the checkpoint.
    command+=(--override-opt-param-scheduler)
    # And another schedule, or other sizes: optimizer states that any of them can read.
    ((replicas == 1)) || command+=(--dist-ckpt-optim-fully-reshardable)
}

run_or_print() {
    local name
    if [[ $DRY_RUN != 1 ]]; then
        exec "${command[@]}"
    fi
    ((${RANK:-0} == 0)) || return 0
    for name in ZERO_BUBBLE_DEVICE OMP_NUM_THREADS CUDA_DEVICE_MAX_CONNECTIONS \
        TORCH_NCCL_HIGH_PRIORITY NCCL_DEBUG; do
        printf '%s=%q ' "$name" "${!name}"
    done
    if [[ $LAUNCHER == srun ]]; then
        printf '%s=%q ' WORLD_SIZE "$WORLD_SIZE" RANK "$RANK" LOCAL_RANK "$LOCAL_RANK" \
            MASTER_ADDR "$MASTER_ADDR" MASTER_PORT "$MASTER_PORT"
    fi
    printf '%q ' "${command[@]}"
    echo
}
