"""torch on a CPU that answers as a CUDA device would, for code that knows only CUDA.

Devices asked for become the CPU, streams and events do nothing, and memory figures are zero.
CPU mode (`cpu.py`) is the only user.
"""

import functools
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.utils._device import _device_constructors
from torch.utils.data import DataLoader

__all__ = ["FusedAdam", "NullEvent", "NullStream", "install", "installed"]

CPU = torch.device("cpu")
MEMORY_BYTES = 8 << 30  # what the pretended device reports as its memory


def install() -> None:
    """Change torch for the rest of this process."""
    _redirect_devices()
    _answer_for_cuda()
    _keep_random_state_in_data_loaders()


def installed() -> bool:
    """Whether torch was changed in this process."""
    return torch.cuda.Stream is NullStream


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
