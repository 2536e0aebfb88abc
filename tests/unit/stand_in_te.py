"""A stand-in for Transformer Engine on a CPU: not that library, but what it shows Megatron.

It has what splitting B and W rests on: layers built with ``delay_wgrad_compute`` end their
backward pass with ``wgrad_store.put``, hand autograd no gradient of the weight, and compute it in
``backward_dw``. Autograd gets a placeholder where a kernel adds into ``main_grad``, and of grouped
layers else the memory that is to be written to. Products are plain torch. Where versions differ,
after the stricter one. `tools/test_transformer_engine.py` runs the same tests over the real Python
of 2.8 to 2.20. What Megatron imports besides is there by name only.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.unit import compiled_te

__all__ = ["GroupedLinear", "LayerNormLinear", "Linear", "install"]

VERSION = "2.20.2"
REAL = "ZERO_BUBBLE_TEST_ENGINE"


class WeightGradStore:
    """First in, first out, of one layer."""

    def __init__(self, delay_wgrad_compute: bool = False) -> None:
        self.enabled = delay_wgrad_compute
        self.context: deque[tuple[list[Any], Callable[..., Any]]] = deque()

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensor_list: list[Any], func: Callable[..., Any]) -> None:
        self.context.append((tensor_list, func))

    def pop(self) -> tuple[Any, list[Any]]:
        if not self.context:
            raise RuntimeError("nothing was put")
        tensors, function = self.context.popleft()
        return function(*tensors), tensors


class _Matmul(torch.autograd.Function):  # type: ignore[misc]
    """One product for each weight; rows of the input are dealt to weights by ``splits``."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, layer: Any, splits: Sequence[int], *matrices: Any
    ) -> torch.Tensor:
        weights, biases = matrices[: len(splits)], matrices[len(splits) :]
        ctx.save_for_backward(input, *weights)
        ctx.layer, ctx.splits, ctx.biases = layer, tuple(splits), bool(biases)
        first = layer.is_first_forward
        ctx.overwrites = layer.fuse_wgrad_accumulation and bool(first)
        rows = input.reshape(-1, input.shape[-1]).split(ctx.splits)
        parts = [row @ weight.t() for row, weight in zip(rows, weights, strict=True)]
        if biases:
            parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
        return torch.cat(parts).view(*input.shape[:-1], weights[0].shape[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        input, *weights = ctx.saved_tensors
        layer, fused, overwrites = ctx.layer, ctx.layer.fuse_wgrad_accumulation, ctx.overwrites
        (output,) = grad_outputs
        flat = output.reshape(-1, output.shape[-1])
        outputs = flat.split(ctx.splits)
        grad_input = torch.cat([o @ w for o, w in zip(outputs, weights, strict=True)])

        def weight_gradients(inputs: Any, outputs: Any, results: Any = None) -> Any:
            xs, dys = layer.rows(inputs), layer.rows(outputs)
            products = [dy.t() @ x for x, dy in zip(xs, dys, strict=True)]
            if fused:
                for parameter, product in zip(layer.weights(), products, strict=True):
                    if overwrites:
                        parameter.main_grad.zero_()
                    parameter.main_grad.add_(product)
            elif results:
                for result, product in zip(results, products, strict=True):
                    result.copy_(product)
            of_biases = [dy.sum(dim=0) if ctx.biases else None for dy in dys]
            return layer.as_result(products, of_biases)

        grad_weights: list[Any] = [None] * len(weights)
        grad_biases: list[Any] = [None] * len(weights)
        left = layer.left(input, flat, ctx.splits)
        if not weights[0].requires_grad:
            fused = False  # and biases that the layer adds get nothing either
        elif layer.wgrad_store.delay_wgrad_compute():
            if len(left) > 2 and not fused:
                # Autograd gets what W writes to, and whatever lies there.
                grad_weights = [_whatever(one) for one in weights]
                left[2].extend(grad_weights)
            layer.wgrad_store.put(left, weight_gradients)
        else:
            grad_weights, grad_biases = layer.of_result(weight_gradients(*left[:2]), None)
        if fused:
            for index, parameter in enumerate(layer.weights()):
                parameter.grad_added_to_main_grad = True
                grad_weights[index] = _whatever(parameter)
        biases = grad_biases if ctx.biases else ()
        return grad_input.view(input.shape), None, None, *grad_weights, *biases


def _whatever(like: torch.Tensor) -> torch.Tensor:
    """Memory that nobody has written to: a gradient that somebody adds is noticed."""
    return torch.full_like(like, float("nan"))


class _Layer(torch.nn.Module):  # type: ignore[misc]
    """What the layers below have in common."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        names: Sequence[str],
        bias: bool,
        return_bias: bool,
        fuse_wgrad_accumulation: bool,
        delay_wgrad_compute: bool,
        params_dtype: torch.dtype | None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
    ) -> None:
        super().__init__()
        assert tp_size == 1
        self.parallel_mode, self.tp_size = parallel_mode, tp_size
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self.is_first_forward: bool | None = None
        self._names = tuple(names)
        for name in names:
            weight = torch.empty(out_features, in_features, dtype=params_dtype)
            (init_method or torch.nn.init.normal_)(weight)
            self.register_parameter(f"weight{name}", torch.nn.Parameter(weight))
            if bias:
                zeros = torch.zeros(out_features, dtype=params_dtype)
                self.register_parameter(f"bias{name}", torch.nn.Parameter(zeros))
        if delay_wgrad_compute:
            for parameter in self.parameters():
                parameter.skip_backward_post_hook = True

    def weights(self) -> list[torch.nn.Parameter]:
        return [getattr(self, f"weight{name}") for name in self._names]

    def biases(self) -> list[torch.nn.Parameter]:
        return [getattr(self, f"bias{name}") for name in self._names] if self.use_bias else []

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def product(
        self, input: torch.Tensor, splits: Sequence[int], is_first_microbatch: bool | None
    ) -> Any:
        self.is_first_forward = is_first_microbatch
        biases = self.biases() if self.apply_bias else []
        output = _Matmul.apply(input, self, splits, *self.weights(), *biases)
        if not self.return_bias:
            return output
        return output, (self.biases() if len(self._names) > 1 else self.biases()[0])

    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute():
            return
        result, tensors = self.wgrad_store.pop()
        of_weights, of_biases = self.of_result(result, tensors)
        if not self.fuse_wgrad_accumulation:
            for parameter, gradient in zip(self.weights(), of_weights, strict=True):
                parameter.grad = gradient
        for parameter, gradient in zip(self.biases(), of_biases, strict=False):
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def left(self, input: torch.Tensor, flat: torch.Tensor, splits: Sequence[int]) -> list[Any]:
        """What its backward puts: the input as it came, and the gradient of the output."""
        return [input, flat]

    def rows(self, tensors: Any) -> list[torch.Tensor]:
        return [tensors.reshape(-1, tensors.shape[-1])]

    def as_result(self, of_weights: list[Any], of_biases: list[Any]) -> tuple[Any, ...]:
        return of_weights[0], of_biases[0]

    def of_result(
        self, result: tuple[Any, ...], tensors: list[Any] | None
    ) -> tuple[list[Any], list[Any]]:
        return [result[0]], [result[1]]


class Linear(_Layer):
    """One weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        params_dtype: torch.dtype | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            names=[""],
            bias=bias,
            return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            params_dtype=params_dtype,
            init_method=init_method,
            tp_size=tp_size,
            parallel_mode=parallel_mode,
        )

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self.product(inp, [inp.numel() // inp.shape[-1]], is_first_microbatch)


class LayerNormLinear(Linear):
    """A norm before it, whose parameters keep their gradients in B."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, **options)
        dtype = options.get("params_dtype")
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=dtype))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=dtype))
        self.eps = eps

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = torch.nn.functional.layer_norm(
            inp, (self.in_features,), self.layer_norm_weight, self.layer_norm_bias, self.eps
        )
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(_Layer):
    """A weight for each expert; rows come sorted by expert."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        params_dtype: torch.dtype | None = None,
        **_: Any,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            names=[str(index) for index in range(num_gemms)],
            bias=bias,
            return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            params_dtype=params_dtype,
        )
        self.num_gemms = num_gemms

    def forward(
        self, inp: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> Any:
        return self.product(inp, m_splits, is_first_microbatch)

    def left(self, input: torch.Tensor, flat: torch.Tensor, splits: Sequence[int]) -> list[Any]:
        rows = input.reshape(-1, input.shape[-1])
        return [list(rows.split(splits)), list(flat.split(splits)), []]

    def rows(self, tensors: Any) -> list[torch.Tensor]:
        return list(tensors)

    def as_result(self, of_weights: list[Any], of_biases: list[Any]) -> tuple[Any, ...]:
        return of_weights, of_biases, None

    def of_result(
        self, result: tuple[Any, ...], tensors: list[Any] | None
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of weights are where the backward has said, if that was long ago."""
        return list(result[0] if tensors is None else tensors[2]), list(result[1])


class LayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]
    """Takes what it does not know."""

    def __init__(self, normalized_shape: int, eps: float, **_: Any) -> None:
        super().__init__(normalized_shape, eps=eps)


class _Quantized(torch.Tensor):  # type: ignore[misc]
    """There are none."""


class _ByName(torch.nn.Module):  # type: ignore[misc]
    """Somebody derives from it, and makes none."""


@contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def install() -> None:
    """Let `import transformer_engine` find this. Before Megatron is imported.

    Where the environment names a directory in `REAL`, it is the real Python that lies there.
    """
    real = os.environ.get(REAL)
    if real:
        compiled_te.install(Path(real))
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("Megatron has looked for Transformer Engine already")
    parts: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        ".pytorch": {
            "Linear": Linear,
            "LayerNormLinear": LayerNormLinear,
            "GroupedLinear": GroupedLinear,
            "LayerNorm": LayerNorm,
            "RMSNorm": _ByName,
            "DotProductAttention": _ByName,
        },
        ".pytorch.fp8": {
            "FP8GlobalStateManager": object,
            "fp8_autocast": _nothing,
            "fp8_model_init": _nothing,
        },
        ".pytorch.distributed": {
            "CudaRNGStatesTracker": type("Tracker", (), {}),
            "activation_recompute_forward": _nothing,
        },
        ".pytorch.ops": {"Sequential": _ByName, "FusibleOperation": _ByName},
        ".pytorch.router": {"__getattr__": lambda name: None},
        ".pytorch.tensor": {"QuantizedTensor": _Quantized},
        ".common": {},
        ".common.recipe": {"DelayedScaling": type("DelayedScaling", (), {})},
    }
    for suffix, names in parts.items():
        module = ModuleType("transformer_engine" + suffix)
        module.__dict__.update(names, __path__=[])
        sys.modules[module.__name__] = module
        parent, _, last = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
