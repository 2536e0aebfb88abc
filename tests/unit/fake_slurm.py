"""Programs of Slurm's names that do the least of what theirs do, on this machine.

srun starts its tasks as processes here; scancel signals them; scontrol names the hosts, and writes
down what was put back into the queue.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["install"]

_PROGRAMS = {
    "srun": r"""
        nodes=1 each=1 passes_on=
        while [[ $1 == --* ]]; do
            case $1 in
                --nodes) nodes=$2; shift 2 ;;
                --ntasks-per-node) each=$2; shift 2 ;;
                --cpus-per-task) shift 2 ;;
                --kill-on-bad-exit=1 | --label) shift ;;
                --export=ALL) passes_on=1; shift ;;
                *) echo "srun: $1?" >&2; exit 64 ;;
            esac
        done
        # As after sbatch --export=..., which srun would go by.
        [[ -n $passes_on ]] || set -- env -i PATH="$PATH" FAKE_SLURM="$FAKE_SLURM" "$@"
        tasks=()
        export SLURM_STEP_NUM_TASKS=$((nodes * each))
        for ((task = 0; task < nodes * each; task++)); do
            SLURM_PROCID=$task SLURM_LOCALID=$((task % each)) "$@" &
            tasks+=($!)
        done
        echo "${tasks[*]}" >"$FAKE_SLURM/tasks"
        code=0
        for task in "${tasks[@]}"; do wait "$task" || code=$?; done
        exit "$code"
    """,
    "scancel": r"""
        [[ $1 == --signal=TERM && $2 == "$SLURM_JOB_ID" ]] || exit 64
        read -ra tasks <"$FAKE_SLURM/tasks"
        kill -TERM "${tasks[@]}"
    """,
    "scontrol": r"""
        case "$1 $2" in
            "show hostnames") tr , '\n' <<<"$3" ;;
            requeue*) echo "$2" >>"$FAKE_SLURM/requeued" ;;
            *) exit 64 ;;
        esac
    """,
}


def install(directory: Path) -> dict[str, str]:
    """Write them there; returns the environment in which Slurm would start a batch script."""
    for name, text in _PROGRAMS.items():
        program = directory / name
        program.write_text(f"#!/usr/bin/env bash\nset -u{text}")
        program.chmod(0o755)
    return {
        "PATH": f"{directory}:/usr/bin:/bin",
        "FAKE_SLURM": str(directory),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "localhost,other",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS_PER_NODE": "2",
    }
