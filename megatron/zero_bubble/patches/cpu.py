"""CPU mode: Megatron trains, evaluates, saves and resumes on CPUs over gloo.

Megatron asks CUDA for devices, streams, memory figures and random states. In CPU mode every one
of these questions gets the CPU's answer, so that the same code runs on a laptop and in CI. The
numbers are Megatron's own: no arithmetic changes. `cpu_torch.py` holds what concerns torch alone,
`cpu_context_parallel.py` a stand-in for attention that only Transformer Engine has.

`ZERO_BUBBLE_DEVICE` decides: `cpu` turns the mode on, `cuda` keeps it off, and without the variable
it is on only where no CUDA device is found. `install()` must run before anything imports
`megatron.core` or `megatron.training`. Nothing but these two is imported from this project, so
that a process can ask for plain Megatron on CPUs and get just that:

    from megatron.zero_bubble.patches import cpu
    cpu.install()
"""

import copy
import functools
import importlib.util
import logging
import multiprocessing
import os
import sys
import warnings
from argparse import Namespace
from typing import Any

import torch

from megatron.zero_bubble.patches import cpu_torch

__all__ = ["DEVICE_VARIABLE", "apply_argument_defaults", "install", "installed", "wanted"]

DEVICE_VARIABLE = "ZERO_BUBBLE_DEVICE"

CUDA_PACKAGES = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")

# What CPU mode sets on Megatron's parsed arguments, in place of defaults made for GPUs.
ARGUMENTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "num_workers": 0,  # a loader process would only take a core away from a stage
}
# Arguments that no CPU can honour: what they are allowed to be.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "fp8": (None, False),
    "fp4": (None, False),
    "tp_comm_overlap": (False,),
    "moe_grouped_gemm": (False,),
    "use_megatron_fsdp": (False,),
    "use_torch_fsdp2": (False,),
    "use_precision_aware_optimizer": (False,),
    "optimizer_cpu_offload": (False,),
    "cuda_graph_impl": ("none", None),
    "ckpt_fully_parallel_load": (False,),
    "record_memory_history": (False,),
}
FLAGS = {"fp8": "--fp8-format", "fp4": "--fp4-format"}  # not named as their arguments are


def wanted() -> str | None:
    """The reason to run on the CPU, or None when Megatron should use CUDA.

    Raises:
        ValueError: ZERO_BUBBLE_DEVICE is neither `cpu` nor `cuda`, or `cuda` without a device.
    """
    choice = os.environ.get(DEVICE_VARIABLE)
    if choice == "cpu":
        return f"{DEVICE_VARIABLE}=cpu"
    if choice == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"{DEVICE_VARIABLE}=cuda (or --zero-bubble-device cuda), but torch finds no CUDA "
                "device on this machine: `zero-bubble doctor` says why; 'cpu' trains without"
            )
        return None
    if choice:
        raise ValueError(
            f"{DEVICE_VARIABLE}={choice!r} is not a device: use 'cpu' or 'cuda', or leave it unset "
            "to use CUDA where there is a device and the CPU elsewhere"
        )
    # Once installed, is_available() answers for the pretended device.
    return None if torch.cuda.is_available() and not installed() else "no CUDA device found"


def installed() -> bool:
    """Whether this process runs in CPU mode."""
    return cpu_torch.installed()


def install() -> bool:
    """Switch this process to CPU mode if it is wanted; say so on rank 0. Safe to call again.

    Returns:
        Whether the process now runs in CPU mode.

    Raises:
        ValueError: ZERO_BUBBLE_DEVICE has an unknown value.
        RuntimeError: Megatron was imported already and has bound CUDA-only packages.
    """
    if installed():
        return True
    reason = wanted()
    if reason is None:
        return False
    _say(f"zero-bubble: CPU mode ({reason})")
    _set_environment()
    _block_cuda_packages()
    cpu_torch.install()
    _adapt_megatron()
    return True


def apply_argument_defaults(args: Namespace) -> None:
    """Set on Megatron's parsed arguments what CPU mode needs; does nothing outside CPU mode.

    To be called between parsing and `validate_args`. What is set is printed on rank 0, so that a
    flag given on the command line never changes silently.

    Raises:
        ValueError: an argument asks for something that only a GPU has.
    """
    if not installed():
        return
    for name, allowed in ALLOWED.items():
        value = getattr(args, name, allowed[0])
        if value not in allowed:
            flag = FLAGS.get(name, "--" + name.replace("_", "-"))
            raise ValueError(
                f"{flag} (given: {value}) needs a GPU and this run is in CPU mode: "
                f"drop the flag, or set {DEVICE_VARIABLE}=cuda"
            )
    window = getattr(args, "window_size", None)
    if getattr(args, "context_parallel_size", 1) > 1 and window is not None:
        raise ValueError(
            f"--window-size {window} does not work with --context-parallel-size "
            f"{args.context_parallel_size} in CPU mode, whose stand-in for attention over parts "
            "of a sequence knows no window: leave one of them out"
        )
    changed = {k: v for k, v in ARGUMENTS.items() if getattr(args, k, v) != v}
    backend = getattr(args, "attention_backend", None)
    if backend is not None and backend.name not in ("unfused", "local"):
        changed["attention_backend"] = type(backend).unfused
    for name, value in changed.items():
        setattr(args, name, value)
    if changed:
        listed = ", ".join(f"{k}={getattr(v, 'name', v)}" for k, v in changed.items())
        _say(f"zero-bubble: CPU mode sets {listed}")


@functools.cache
def _say(line: str) -> None:
    """Print a line once in the whole run: Megatron may parse twice, and saving starts processes."""
    if os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:
        print(line, flush=True)


def _set_environment() -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that is there stays untouched
    if "OMP_NUM_THREADS" not in os.environ:
        # The variable is for child processes: torch read it when it was imported.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


def _block_cuda_packages() -> None:
    """Make the imports of GPU-only packages fail, so that Megatron takes its local code."""
    bound = [name for name in CUDA_PACKAGES if sys.modules.get(name) is not None]
    if bound and "megatron.core" in sys.modules:
        raise RuntimeError(
            f"CPU mode comes too late: megatron.core has already imported {', '.join(bound)}. "
            "Make the adaptor (or cpu.install()) the first import of the script"
        )
    for name in CUDA_PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]
    # They are missing on purpose.
    for message in (".*Apex (is|are) not installed", "Only transformer-engine>="):
        warnings.filterwarnings("ignore", message=message, module="megatron")


def _adapt_megatron() -> None:
    """Change what is Megatron's own, once torch answers as above."""
    import megatron.core.datasets.utils as dataset_utils
    import megatron.core.optimizer as optimizer
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron.zero_bubble.patches import cpu_context_parallel

    # The wheel holds the compiled helpers but not the Makefile that would build them.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = cpu_torch.FusedAdam, False
    distrib_optimizer.Adam = cpu_torch.FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    # Loading writes in place to fp32 parameters, which autograd refuses to see.
    distributed = distrib_optimizer.DistributedOptimizer
    distributed.load_parameter_state_from_dp_reshardable = torch.no_grad()(
        distributed.load_parameter_state_from_dp_reshardable
    )

    _allow_sequence_parallel_norms(WrappedTorchNorm)
    cpu_context_parallel.allow_context_parallel(DotProductAttention)

    def as_numpy_or_same(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # Megatron's function converts to numpy only what it moved off a GPU.
    moe_utils.maybe_move_tensor_to_cpu = as_numpy_or_same
    token_dispatcher.maybe_move_tensor_to_cpu = as_numpy_or_same

    check = ModelParallelConfig.__post_init__

    def check_and_keep_outputs(self: ModelParallelConfig) -> None:
        check(self)
        # gloo reads a tensor until its send is over: its storage may not be freed before.
        self.deallocate_pipeline_outputs = False

    ModelParallelConfig.__post_init__ = check_and_keep_outputs

    # With one generator for both, forking CUDA's state does move the CPU's: no news.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _allow_sequence_parallel_norms(norm: Any) -> None:
    """Let torch's norms serve sequence parallelism.

    A norm works token by token, so a slice of the sequence needs nothing special in the forward
    pass. Its parameters are marked for Megatron, which then sums their gradients over the tensor
    parallel group.
    """
    build = norm.__new__

    def build_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return build(cls, config, *args, **kwargs)
        config = copy.copy(config)
        config.sequence_parallel = False
        module = build(cls, config, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = True
        return module

    norm.__new__ = staticmethod(build_marked)
