"""CPU mode: Megatron trains, evaluates, saves and resumes on CPUs over gloo.

Megatron asks CUDA for devices, streams, memory figures and random states. In CPU mode every one
of these questions gets the CPU's answer, so that the same code runs on a laptop and in CI. The
numbers are Megatron's own: no arithmetic changes, except that Adam is written out below.

`ZERO_BUBBLE_DEVICE` decides: `cpu` turns the mode on, `cuda` keeps it off, and without the variable
it is on only where no CUDA device is found. `install()` must run before anything imports
`megatron.core` or `megatron.training`. Nothing else of this project is imported here, so a process
that only wants plain Megatron on CPUs can use this file alone:

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
import time
import types
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.utils._device import _device_constructors
from torch.utils.data import DataLoader

__all__ = ["DEVICE_VARIABLE", "apply_argument_defaults", "install", "installed", "wanted"]

DEVICE_VARIABLE = "ZERO_BUBBLE_DEVICE"

CPU = torch.device("cpu")
CUDA_PACKAGES = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")
MEMORY_BYTES = 8 << 30  # what the pretended device reports as its memory

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
    "context_parallel_size": (1,),
    "tp_comm_overlap": (False,),
    "moe_grouped_gemm": (False,),
    "use_megatron_fsdp": (False,),
    "use_torch_fsdp2": (False,),
    "use_precision_aware_optimizer": (False,),
    "optimizer_cpu_offload": (False,),
    "cuda_graph_impl": ("none", None),
}


def wanted() -> str | None:
    """The reason to run on the CPU, or None when Megatron should use CUDA.

    Raises:
        ValueError: ZERO_BUBBLE_DEVICE is neither `cpu` nor `cuda`.
    """
    choice = os.environ.get(DEVICE_VARIABLE)
    if choice == "cpu":
        return f"{DEVICE_VARIABLE}=cpu"
    if choice == "cuda":
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
    return torch.cuda.Stream is NullStream


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
    _redirect_devices()
    _answer_for_cuda()
    _keep_random_state_in_data_loaders()
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
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} (given: {value}) needs a GPU and this run is in CPU mode: "
                f"drop the flag, or set {DEVICE_VARIABLE}=cuda"
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


class NullStream:
    """Stands for a stream, an event or their contexts: every method does nothing."""

    device, stream_id, cuda_stream = CPU, 0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "NullStream":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def query(self) -> bool:
        return True

    def record_event(self, event: "NullEvent | None" = None) -> "NullEvent":
        event = event or NullEvent()
        event.record()
        return event


class NullEvent(NullStream):
    """An event that keeps the host's time, since the host is what computes."""

    def record(self, *args: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "NullEvent") -> float:
        return (end.seconds - self.seconds) * 1e3


class FusedAdam(torch.optim.Optimizer):  # type: ignore[misc]
    """torch's Adam with one `step` per parameter group, as in Apex and Transformer Engine.

    Megatron's distributed optimizer cannot reload the `step` that torch.optim.AdamW keeps per
    parameter. It does reload this one, so checkpoints of CPU runs resume.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            states = [self.state[p] for p in params]
            for param, state in zip(params, states, strict=True):
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
            adam(
                params,
                [p.grad for p in params],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                max_exp_avg_sqs=[],
                # torch counts up before it uses the step.
                state_steps=[torch.tensor(group["step"] - 1.0) for _ in params],
                foreach=False,
                amsgrad=False,
                maximize=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled_weight_decay=self.adam_w_mode,
            )


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


def _to_cpu(device: Any) -> Any:
    """The CPU for any spelling of a CUDA device; anything else as it is."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.split(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def _redirect_devices() -> None:
    """Tensors asked for on CUDA are made on the CPU, and say they are CUDA's when asked by name."""

    def on_cpu(function: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                kwargs["device"] = _to_cpu(kwargs["device"])
            return function(*args, **kwargs)

        return wrapper

    for function in _device_constructors():
        name = function.__name__
        if getattr(torch, name, None) is function:
            setattr(torch, name, on_cpu(function))

    tensor: Any = torch.Tensor
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(tensor, name, on_cpu(getattr(tensor, name)))
    to, type_ = on_cpu(tensor.to), tensor.type

    def type_as_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron sorts parameters by the names of CUDA's tensor types.
        if args or kwargs:
            return type_(self, *args, **kwargs)
        return type_(self).replace("torch.", "torch.cuda.", 1)

    tensor.to = lambda self, *args, **kwargs: to(self, *map(_to_cpu, args), **kwargs)
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, *args, **kwargs: None
    tensor.type = type_as_cuda


def _answer_for_cuda() -> None:
    """Give torch.cuda's functions the answers of a device that is the CPU."""
    cuda: Any = torch.cuda
    stream = NullStream()
    properties = types.SimpleNamespace(name="cpu", major=9, minor=0, total_memory=MEMORY_BYTES)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "current_stream": stream,
        "default_stream": stream,
        "get_device_name": "cpu",
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
        "memory_stats": {},
    }
    for name in ("set_device", "set_stream", "synchronize", "empty_cache"):
        answers[name] = None
    for name in ("memory_allocated", "memory_reserved", "device_memory_used"):
        answers[name] = 0
    for name in ("max_memory_allocated", "max_memory_reserved"):
        answers[name] = 0
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated"):
        answers[name] = None

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    for name, value in answers.items():
        function = constant(value)
        setattr(cuda, name, function)
        for module in (cuda.random, cuda.memory):  # they hold names of their own
            if hasattr(module, name):
                setattr(module, name, function)
    cuda.Stream, cuda.Event = NullStream, NullEvent
    cuda.stream = cuda.device = NullStream
    # Every function about random states goes through this tuple.
    cuda.default_generators = (torch.default_generator,)
    torch.accelerator.is_available = lambda: False  # else data loaders pin memory
    # Megatron's fusions use torch.compile, which on small CPU runs costs more than it saves.
    torch.compile = lambda model=None, **kwargs: model or (lambda function: function)


def _keep_random_state_in_data_loaders() -> None:
    """Let data loaders draw their seed without moving the random state.

    On a GPU dropout has a generator of its own. Here one generator serves both, and the seed that
    a loader draws when its iteration begins would make a resumed run differ from one that never
    stopped.
    """
    iterate = DataLoader.__iter__

    @functools.wraps(iterate)
    def iterate_apart(self: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return iterate(self)

    DataLoader.__iter__ = iterate_apart


def _adapt_megatron() -> None:
    """Change what is Megatron's own, once torch answers as above."""
    import megatron.core.datasets.utils as dataset_utils
    import megatron.core.optimizer as optimizer
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # The wheel holds the compiled helpers but not the Makefile that would build them.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    # Loading writes in place to fp32 parameters, which autograd refuses to see.
    distributed = distrib_optimizer.DistributedOptimizer
    distributed.load_parameter_state_from_dp_reshardable = torch.no_grad()(
        distributed.load_parameter_state_from_dp_reshardable
    )

    _allow_sequence_parallel_norms(WrappedTorchNorm)

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
