"""The launch scripts: their commands are what Megatron takes, and Slurm's signals save the run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cpu_mode import checks_of
from tests.unit.fake_slurm import install

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "gpt3"
MODELS = {"1.5b": 8, "6.2b": 8, "14.6b": 16, "28.3b": 32}
"""Ranks of one replica."""
BATCH = {"slurm_one_node.sh": ("1.5b", 8), "slurm_many_nodes.sh": ("28.3b", 32)}
"""Model and ranks of each batch script, as it stands."""
TOY = {
    "NUM_LAYERS": "2",
    "HIDDEN_SIZE": "16",
    "NUM_HEADS": "2",
    "SEQ_LENGTH": "16",
    "VOCAB_SIZE": "64",
    "PIPELINE_SIZE": "2",
    "NUM_MICROBATCHES": "2",
    "MICRO_BATCH_SIZE": "1",
    "EVAL_ITERS": "0",
    "LOG_INTERVAL": "1",
    "ZERO_BUBBLE_DEVICE": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
}
VALIDATED = checks_of("tests.unit.example_checks", alone=True)


def script(name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with nothing in the environment but this."""
    return subprocess.run(
        [SCRIPTS / name, *words],
        env={"PATH": "/usr/bin:/bin"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def dry_run(name: str, *words: str, **environment: str) -> tuple[dict[str, str], list[str]]:
    """(variables, words) of the last command that the script would run."""
    done = script(name, *words, DRY_RUN="1", **environment)
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout.splitlines()[-1])
    variables = {}
    while "=" in command[0]:
        variable, _, value = command.pop(0).partition("=")
        variables[variable] = value
    return variables, command


def flags(command: list[str]) -> list[str]:
    (at,) = [place for place, word in enumerate(command) if word.endswith("pretrain_gpt.py")]
    assert Path(command[at]) == ROOT / "pretrain_gpt.py"
    return command[at + 1 :]


@pytest.mark.parametrize("model", MODELS)
def test_the_paper_s_sizes(model: str) -> None:
    """Those of its Table 5, as validated by Megatron for the least number of ranks."""
    rows = json.loads((ROOT / "zero_bubble/data/paper_table5.json").read_text())["rows"]
    row = next(one for one in rows if one["model"].lower() == model)
    args = VALIDATED("validated", flags=flags(dry_run(f"{model}.sh")[1]), ranks=MODELS[model])
    assert args["num_layers"] == row["layers"]
    assert args["hidden_size"] == row["hidden"]
    assert args["num_attention_heads"] == row["heads"]
    assert args["seq_length"] == row["seq"]
    assert args["micro_batch_size"] == row["microbatch_size"]
    assert args["pipeline_model_parallel_size"] == row["stages"] == MODELS[model]
    assert args["global_batch_size"] == row["microbatch_size"] * row["microbatches"]
    # The ends of the model have a layer less than other stages.
    assert args["account_for_embedding_in_pipeline_split"]
    assert args["account_for_loss_in_pipeline_split"]
    billions = (12 * row["layers"] * row["hidden"] ** 2 + 50304 * row["hidden"]) / 1e9
    assert billions == pytest.approx(float(model[:-1]), rel=0.015)


@pytest.mark.parametrize("name", BATCH)
def test_batch_scripts_start_a_model_by_srun(name: str) -> None:
    model, ranks = BATCH[name]
    done = script(name, "--seed", "7", DRY_RUN="1")
    srun = shlex.split(done.stdout.splitlines()[0])
    nodes = int(srun[srun.index("--nodes") + 1])
    assert nodes * int(srun[srun.index("--ntasks-per-node") + 1]) == ranks
    assert srun[-3:] == [str(SCRIPTS / f"{model}.sh"), "--seed", "7"]
    variables, command = dry_run(name, "--seed", "7")
    assert "torch.distributed.run" not in command
    assert variables["WORLD_SIZE"] == str(ranks)
    args = VALIDATED("validated", flags=flags(command), ranks=ranks)
    assert args["seed"] == 7
    assert args["exit_signal_handler"]
    assert args["save"] == args["load"]
    assert args["save_interval"] == 200


@pytest.mark.parametrize(
    ("name", "ranks", "environment", "expected"),
    [
        (
            "1.5b.sh",
            16,
            {"TENSOR_SIZE": "2"},
            # PyTorch's norms cannot do it, and nobody has said that there are others.
            {"sequence_parallel": False, "data_parallel_size": 1},
        ),
        (
            "1.5b.sh",
            16,
            {"TENSOR_SIZE": "2", "FUSED": "1"},
            {
                "sequence_parallel": True,
                "data_parallel_size": 1,
                "use_distributed_optimizer": False,
            },
        ),
        (
            "6.2b.sh",
            32,
            {"NNODES": "4", "SAVE": "/tmp/none"},
            {
                "data_parallel_size": 4,
                "global_batch_size": 4 * 3 * 24,
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "dist_ckpt_optim_fully_reshardable": True,
            },
        ),
        (
            "14.6b.sh",
            16,
            {"PIPELINE_SCHEDULE": "auto", "SAVE": "/tmp/none"},
            {"pipeline_schedule": "auto", "save": "/tmp/none"},
        ),
        (
            "1.5b.sh",
            16,
            {"CONTEXT_SIZE": "2", "PIPELINE_SCHEDULE": "megatron"},
            {"context_parallel_size": 2, "data_parallel_size": 1, "global_batch_size": 6 * 24},
        ),
        ("1.5b.sh", 8, {"PIPELINE_SCHEDULE": "megatron"}, {"pipeline_schedule": "megatron"}),
        ("1.5b.sh", 8, {"PIPELINE_SCHEDULE": "zb-v"}, {"pipeline_schedule": "zb-v"}),
        ("1.5b.sh", 2, TOY | {"GPUS_PER_NODE": "2"}, {"num_layers": 2, "data_parallel_size": 1}),
        ("laptop.sh", 2, {}, {"num_layers": 4}),
        (
            "laptop.sh",
            8,
            {"CONTEXT_PARALLEL_SIZE": "2", "DATA_PARALLEL_SIZE": "2"},
            {"context_parallel_size": 2, "data_parallel_size": 2},
        ),
    ],
)
def test_what_variables_change(
    name: str, ranks: int, environment: dict[str, str], expected: dict[str, Any]
) -> None:
    args = VALIDATED("validated", flags=flags(dry_run(name, **environment)[1]), ranks=ranks)
    assert {key: args[key] for key in expected} == expected


def test_torchrun_on_one_node_and_on_many() -> None:
    command = dry_run("1.5b.sh")[1]
    assert command[1:6] == ["-m", "torch.distributed.run", "--nproc-per-node", "8", "--standalone"]
    command = dry_run("28.3b.sh", NODE_RANK="3", MASTER_ADDR="first")[1]
    assert "--standalone" not in command
    starts = {"--nnodes": "4", "--node-rank": "3", "--master-addr": "first"}
    for flag, value in starts.items():
        assert command[command.index(flag) + 1] == value


def test_srun_s_task_is_a_rank(tmp_path: Path) -> None:
    slurm = install(tmp_path) | {"SLURM_STEP_NUM_TASKS": "16"}
    variables, command = dry_run("1.5b.sh", **slurm, SLURM_PROCID="0", SLURM_LOCALID="0")
    assert variables.items() >= {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}.items()
    assert variables["MASTER_ADDR"] == "localhost"
    part = slurm | {"SLURM_STEP_NODELIST": "second", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert dry_run("1.5b.sh", **part)[0]["MASTER_ADDR"] == "second"
    assert "--use-distributed-optimizer" in command
    assert script("1.5b.sh", **slurm, SLURM_PROCID="5", DRY_RUN="1").stdout == ""
    # A site may have set it for something else.
    assert dry_run("1.5b.sh", **slurm, SLURM_PROCID="0", NODE_RANK="3")


def test_srun_s_task_is_a_node_s_torchrun(tmp_path: Path) -> None:
    slurm = install(tmp_path) | {"SLURM_STEP_NUM_TASKS": "4", "LAUNCHER": "torchrun"}
    command = dry_run("28.3b.sh", **slurm, SLURM_NODEID="2")[1]
    starts = {"--nnodes": "4", "--node-rank": "2", "--master-addr": "localhost"}
    for flag, value in starts.items():
        assert command[command.index(flag) + 1] == value


@pytest.mark.parametrize(("tensor", "given", "expected"), [
    ("1", None, "32"),
    ("1", "8", "8"),
    ("2", None, "1"),
    ("2", "8", "1"),  # Megatron refuses anything else
])  # fmt: skip
def test_hardware_queues(tensor: str, given: str | None, expected: str) -> None:
    environment = {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    variables, _ = dry_run("1.5b.sh", TENSOR_SIZE=tensor, **environment)
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == expected
    assert variables["ZERO_BUBBLE_DEVICE"] == "cuda"
    others = dry_run("1.5b.sh", CONTEXT_SIZE=tensor, **environment)[0]
    assert others["CUDA_DEVICE_MAX_CONNECTIONS"] == expected


@pytest.mark.parametrize(
    ("name", "environment", "said"),
    [
        ("28.3b.sh", {}, "4 nodes: run it on each of them with MASTER_ADDR"),
        ("28.3b.sh", {"NNODES": "1"}, "8 ranks are no multiple of PIPELINE_SIZE 32 x"),
        ("1.5b.sh", {"GPUS_PER_NODE": "6", "NNODES": "2"}, "run it on each of them"),
        (
            "1.5b.sh",
            {"GPUS_PER_NODE": "12", "NNODES": "1"},
            "12 ranks are no multiple of PIPELINE_SIZE 8 x",
        ),
        ("28.3b.sh", {"NODE_RANK": "4"}, "NODE_RANK=4: with 4 nodes it is 0 to 3"),
        ("1.5b.sh", {"PIPELINE_SIZE": "abc"}, "PIPELINE_SIZE=abc: it must be a whole number"),
        ("1.5b.sh", {"PIPELINE_SIZE": "0"}, "PIPELINE_SIZE=0: it must be a whole number above"),
        ("28.3b.sh", {"NODE_RANK": "08"}, "NODE_RANK=08: with 4 nodes it is 0 to 3"),
        ("slurm_one_node.sh", {"MAX_REQUEUES": "08"}, "MAX_REQUEUES=08: it must be a whole number"),
        ("laptop.sh", {"EVAL_ITERS": "x"}, "EVAL_ITERS=x: it must be a whole number"),
        ("1.5b.sh", {"NNODES": "9" * 20}, "it must be a whole number above 0"),
        ("1.5b.sh", {"NNODES": "two"}, "NNODES=two: it must be a whole number above 0"),
        ("1.5b.sh", {"DRY_RUN": "true"}, "DRY_RUN=true: use 0 or 1"),
        ("1.5b.sh", {"SAVE": "/proc/none"}, "SAVE=/proc/none: no checkpoint can be written"),
        ("laptop.sh", {"SAVE": "/proc/none"}, "SAVE=/proc/none: no checkpoint can be written"),
        ("laptop.sh", {"DRY_RUN": "yes"}, "DRY_RUN=yes: use 0 or 1"),
        ("laptop.sh", {"GLOBAL_BATCH_SIZE": "15"}, "15: it must be a multiple of MICRO_BATCH_SIZE"),
        ("laptop.sh", {"NUM_LAYERS": "x"}, "NUM_LAYERS=x: it must be a whole number above 0"),
        ("slurm_one_node.sh", {"MODEL": "laptop"}, "choose 1.5b, 6.2b, 14.6b or 28.3b"),
        ("slurm_one_node.sh", {"MAX_REQUEUES": "x"}, "MAX_REQUEUES=x: it must be a whole number"),
        ("1.5b.sh", {"EVAL_ITERS": "abc"}, "EVAL_ITERS=abc: it must be a whole number"),
        ("1.5b.sh", {"VOCAB_SIZE": "0"}, "VOCAB_SIZE=0: it must be a whole number above 0"),
        ("1.5b.sh", {"MASTER_PORT": "99999"}, "MASTER_PORT=99999: ports go up to 65535"),
        ("1.5b.sh", {"NUM_LAYERS": "9" * 20}, "it must be a whole number above 0"),
        ("slurm_one_node.sh", {"DRY_RUN": "true"}, "DRY_RUN=true: use 0 or 1"),
        ("1.5b.sh", {"LAUNCHER": "mpirun"}, "LAUNCHER=mpirun: use torchrun, srun or auto"),
        ("1.5b.sh", {"LAUNCHER": "srun"}, "LAUNCHER=srun is for a script that srun has started"),
        ("slurm_one_node.sh", {"MODEL": "9b"}, "choose 1.5b, 6.2b, 14.6b or 28.3b"),
        ("slurm_one_node.sh", {"REPOSITORY": "/"}, "/ is not the repository"),
    ],
)
def test_mistakes(name: str, environment: dict[str, str], said: str) -> None:
    done = script(name, PYTHON="/bin/false", **environment)
    assert done.returncode != 0
    assert said in done.stderr


def closure(name: str) -> str:
    """A script and what it sources, without comments."""
    text = re.sub(r"(^|\s)#.*", r"\1", (SCRIPTS / name).read_text())
    sourced = re.findall(r"^source .*/(\w+\.sh)\"$", text, re.MULTILINE)
    return "\n".join([text, *map(closure, sourced)])


SHELL_S_OWN = {"BASH_SOURCE", "HOSTNAME", "PWD"}


@pytest.mark.parametrize("name", [*BATCH, *(f"{model}.sh" for model in MODELS), "laptop.sh"])
def test_no_script_names_what_it_does_not_set(name: str) -> None:
    """In words, in sums, by ${!name}; whether or not a dry run comes by."""
    text = closure(name)
    assert "set -euo pipefail" in text
    bare = re.sub(r"\$\{\w+:[-?]", "", text)  # has a default, or an error of its own
    used = set(re.findall(r"\$\{?!?([A-Za-z_]\w*)", bare))
    for sum_ in re.findall(r"\(\(([^\n]*?)\)\)", text):
        words = re.sub(r"\$\{[^}]*\}|\$\w+", "", sum_)
        used |= set(re.findall(r"[A-Za-z_]\w*", words))
    set_ = set(re.findall(r"(?:^|[\s'(])(\w+)\+?=", text, re.MULTILINE))
    set_ |= set(re.findall(r"\bfor (\w+) in", text)) | set(re.findall(r"read -ra (\w+)", text))
    for declared in re.findall(r"\blocal ([\w ]+?)$", text, re.MULTILINE):
        set_ |= set(declared.split())
    assert used - set_ <= SHELL_S_OWN


@pytest.mark.slow
def test_a_real_run_by_torchrun(tmp_path: Path) -> None:
    done = subprocess.run(
        [SCRIPTS / "6.2b.sh", "--seed", "3"],
        env=os.environ | TOY | {"GPUS_PER_NODE": "2", "TRAIN_ITERS": "2"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"iteration +2/ +2", done.stdout)
