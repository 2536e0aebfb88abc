# shellcheck shell=bash
# What slurm_one_node.sh and slurm_many_nodes.sh do once Slurm has started them. It is sourced.
#
# srun starts a rank for each GPU, without torchrun between: torchrun would end its ranks at a
# signal, before they can save. Ten minutes before the job's time is over Slurm tells this shell so,
# which tells the ranks to save and stop, and puts the job back into the queue. After a node's
# failure, or preemption, Slurm does that by itself. Either way the job goes on from its last
# checkpoint, under the same number, in the same log.

DRY_RUN=${DRY_RUN:-0}
JOB=${SLURM_JOB_ID:-0}
HOSTS=${SLURM_JOB_NODELIST:-}
# The same for all parts of a job, and no other's.
export SAVE=${SAVE:-$PWD/checkpoints/$JOB}
export SAVE_INTERVAL=${SAVE_INTERVAL:-200}
export EXIT_SIGNAL_HANDLER=1
MAX_REQUEUES=${MAX_REQUEUES:-50}
# Of srun, for a container, say; words are split.
SRUN_ARGS=${SRUN_ARGS:-}

# run_job MODEL NODES GPUS_PER_NODE [arguments of pretrain_gpt.py]
run_job() {
    local script=$REPOSITORY/examples/gpt3/$1.sh nodes=$2 gpus=$3 step code extra
    local told=0 heard saved=none
    [[ -x $script && $1 != laptop && $1 != slurm_* ]] || {
        echo "MODEL=$1: there is no $script; choose 1.5b, 6.2b, 14.6b or 28.3b" >&2
        return 2
    }
    shift 3
    read -ra extra <<<"$SRUN_ARGS"
    find_each_other "$nodes"
    local command=(
        srun --nodes "$nodes" --ntasks-per-node "$gpus" --kill-on-bad-exit=1 --label
        --export=ALL # what is exported above, whatever sbatch was told to pass on
        --cpus-per-task "${SLURM_CPUS_PER_TASK:-8}" # not inherited from sbatch since 22.05
        "${extra[@]}" "$script" "$@"
    )
    [[ $MAX_REQUEUES =~ ^(0|[1-9][0-9]{0,8})$ ]] || {
        echo "MAX_REQUEUES=$MAX_REQUEUES: it must be a whole number" >&2
        return 2
    }
    [[ $DRY_RUN == [01] ]] || {
        echo "DRY_RUN=$DRY_RUN: use 0 or 1" >&2
        return 2
    }
    if [[ $DRY_RUN == 1 ]]; then
        printf '%q ' "${command[@]}"
        echo
        SLURM_STEP_NUM_TASKS=$((nodes * gpus)) LAUNCHER=srun "$script" "$@"
        return
    fi

    trap 'heard=1 told=1 saved=$(last_saved); tell_ranks_to_stop' USR1
    "${command[@]}" &
    step=$!
    heard=1
    while ((heard)); do # a wait that the signal has interrupted says nothing of the step
        heard=0 code=0
        wait "$step" || code=$?
    done
    ((told)) || return "$code"
    if ((code)) && [[ $(last_saved) == "$saved" ]]; then
        echo "not put back into the queue: the ranks ended with code $code, and have saved nothing" \
            "since they were told to"
        return "$code"
    fi
    requeue
}

# The iteration of the last checkpoint.
last_saved() {
    cat "$SAVE/latest_checkpointed_iteration.txt" 2>/dev/null || echo none
}

# The first host of the allocation is where ranks meet, at a port that other jobs there do not use.
find_each_other() {
    local hosts=$HOSTNAME
    [[ -z $HOSTS ]] || hosts=$(scontrol show hostnames "$HOSTS")
    export MASTER_ADDR=${hosts%%$'\n'*}
    export MASTER_PORT=$((20000 + JOB % 10000)) # below those given out by Linux
}

# Of all processes in the job's steps, but not to this shell.
tell_ranks_to_stop() {
    echo "$(date +%FT%T) time is nearly over: the ranks save and stop"
    scancel --signal=TERM "$JOB" || echo "scancel failed: going on until the end" >&2
}

requeue() {
    if ((${SLURM_RESTART_COUNT:-0} >= MAX_REQUEUES)); then
        echo "not put back into the queue: MAX_REQUEUES=$MAX_REQUEUES is reached; go on with" \
            "SAVE=$SAVE sbatch ..."
        return
    fi
    echo "$(date +%FT%T) back into the queue; it goes on from $SAVE"
    scontrol requeue "$JOB"
}
