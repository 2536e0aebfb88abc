"""The compiled part of Transformer Engine on a CPU, so that its Python runs there.

What is real: all Python of the given version, its layers, their store of delayed weight gradients
and what they do to parameters. What is stood in for, in plain torch: the extension
`transformer_engine_torch`, of which there are the products, norms and splits that layers of plain
tensors call, and the core library, which is not loaded. Whatever else of the extension is looked
up can be named and compared, as an enumeration; called, it raises NotImplementedError. So nothing
here says anything of kernels, streams, FP8 or user buffers.

`tools/test_transformer_engine.py` fetches versions and runs tests over them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

__all__ = ["install"]

EXTENSION = "transformer_engine_torch"


class Enumeration(type):
    """The extension's enumerations get their members as they are asked for, and numbers with them.

    A function that is not stood in for is one as well, until it is called.
    """

    def __getattr__(cls, name: str) -> Any:
        if name == "__members__":
            return {key: value for key, value in vars(cls).items() if isinstance(value, cls)}
        if name.startswith("__"):
            raise AttributeError(name)
        member: Any = int.__new__(cls, len(cls.__members__))  # type: ignore[arg-type]
        setattr(cls, name, member)
        return member

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{EXTENSION}.{cls.__name__} is not stood in for on a CPU")


def _enumeration(name: str) -> Any:
    return Enumeration(name, (int,), {})


def _product(a: Any, transa: bool, b: Any, transb: bool) -> Any:
    """Of matrices that are given by columns, and so the other way round."""
    a, b = (one.reshape(-1, one.shape[-1]) for one in (a, b))
    return (b.t() if transb else b) @ (a.t() if transa else a)


def _sum_of_rows(matrix: Any, dtype: torch.dtype) -> Any:
    return matrix.reshape(-1, matrix.shape[-1]).float().sum(dim=0).to(dtype)


def _generic_gemm(types: Any) -> Callable[..., Any]:
    of_torch = {
        types.kFloat32: torch.float32,
        types.kFloat16: torch.float16,
        types.kBFloat16: torch.bfloat16,
    }

    def generic_gemm(
        a: Any,
        transa: bool,
        b: Any,
        transb: bool,
        out: Any,
        quantizer: Any,
        out_type: Any,
        bias: Any,
        _bias_type: Any,
        gelu: bool,
        _gelu_in: Any,
        grad: bool,
        _workspace: Any,
        _workspace_size: int,
        accumulate: bool,
        _split_accumulator: bool,
        *,
        comm_overlap: Any = None,
        extra_output: Any = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        assert quantizer is None
        assert not gelu
        assert comm_overlap is None
        product = _product(a, transa, b, transb)
        if not transb:
            product = product.view(*b.shape[:-1], product.shape[-1])
        if bias is not None and not grad:
            product = product + bias
        if out is None:
            out = product if out_type is None else product.to(of_torch[out_type])
        elif accumulate:
            out.add_(product)
        else:
            out.copy_(product)
        # Of the type of the result, which may be that of `main_grad`.
        grad_bias = _sum_of_rows(b, out.dtype) if bias is not None and grad else None
        return out, grad_bias, None, extra_output

    return generic_gemm


def te_general_grouped_gemm(
    inputs: Sequence[Any],
    transa: bool,
    others: Sequence[Any],
    transb: bool,
    out: Sequence[Any],
    _out_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[Any],
    _bias_type: Any,
    single_output: bool,
    _pre_gelu: Any,
    grad: bool,
    _workspaces: Any,
    _workspace_size: int,
    accumulate: bool,
    *_: Any,
) -> Sequence[Any]:
    """Gradients of biases are written where the caller says."""
    results = out[0].split(list(m_splits)) if single_output else out
    for a, b, result, one in zip(inputs, others, results, bias, strict=True):
        product = _product(a, transa, b, transb)
        if one.numel() and grad:
            one.copy_(_sum_of_rows(b, one.dtype))
        elif one.numel():
            product = product + one
        if accumulate:
            result.add_(product)
        else:
            result.copy_(product)
    return bias


def split_quantize(
    tensor: Any, sections: Sequence[int], quantizers: Sequence[Any], **_: Any
) -> list[Any]:
    assert all(one is None for one in quantizers)
    return list(tensor.split(list(sections)))


def layernorm_fwd(
    input: Any, weight: Any, bias: Any, eps: float, out: Any, quantizer: Any, *_: Any
) -> tuple[Any, Any, Any]:
    assert quantizer is None
    result, mean, deviation = torch.native_layer_norm(input, input.shape[-1:], weight, bias, eps)
    return (result if out is None else out.copy_(result)), mean, deviation


def layernorm_bwd(
    grad: Any, input: Any, mean: Any, deviation: Any, weight: Any, *_: Any
) -> tuple[Any, Any, Any]:
    result: tuple[Any, Any, Any] = torch.ops.aten.native_layer_norm_backward(
        grad.view(input.shape), input, input.shape[-1:], mean, deviation, weight, weight, [True] * 3
    )
    return result


def rmsnorm_fwd(
    input: Any, weight: Any, eps: float, out: Any, quantizer: Any, *_: Any
) -> tuple[Any, None, Any]:
    assert quantizer is None
    scale = torch.rsqrt(input.float().square().mean(dim=-1, keepdim=True) + eps)
    result = (input.float() * scale * weight.float()).to(input.dtype)
    return (result if out is None else out.copy_(result)), None, scale


def rmsnorm_bwd(grad: Any, input: Any, scale: Any, weight: Any, *_: Any) -> tuple[Any, Any]:
    grad, normed = grad.view(input.shape).float(), input.float() * scale
    inner = grad * weight.float()
    grad_input = scale * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True))
    return grad_input.to(input.dtype), (grad * normed).sum(dim=0).to(weight.dtype)


def install(packages: Path) -> None:
    """Switch to CPU mode, and let Megatron find Transformer Engine in this directory.

    Megatron's own imports of it follow, so nothing may have imported Megatron before.
    """
    from megatron.zero_bubble.patches import cpu

    if "megatron.core" in sys.modules:
        raise RuntimeError("Megatron has looked for Transformer Engine already")
    sys.path.insert(0, str(packages))
    sys.modules[EXTENSION] = _extension()
    # Only the export to ONNX needs it, and a package that nothing else does.
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = _anything("onnx_extensions")
    adapt = cpu._adapt_megatron

    def adapt_both() -> None:
        _import_engine(packages)
        adapt()

    # Between torch, which it asks for a device, and Megatron, which asks whether it is there.
    with (
        mock.patch.object(cpu, "_block_cuda_packages"),
        mock.patch.object(cpu, "_adapt_megatron", adapt_both),
    ):
        cpu.install()


def _import_engine(packages: Path) -> None:
    torch.Tensor.is_cuda = property(lambda tensor: True)  # it refuses others
    torch.cuda.get_device_properties().multi_processor_count = 132
    common = sys.modules["transformer_engine.common"] = _common(packages)
    importlib.import_module("transformer_engine.pytorch")
    engine: Any = sys.modules["transformer_engine"]
    engine.common = common


def _extension() -> ModuleType:
    extension: Any = _anything(EXTENSION)
    extension.DType = _enumeration("DType")
    functions = (
        _generic_gemm(extension.DType),
        te_general_grouped_gemm,
        split_quantize,
        layernorm_fwd,
        layernorm_bwd,
        rmsnorm_fwd,
        rmsnorm_bwd,
    )
    for function in functions:
        setattr(extension, function.__name__, torch.no_grad()(function))
    for name, value in {
        "get_cublasLt_version": 130000,
        "get_cudnn_version": 91500,
        "get_num_cublas_streams": 4,
        "get_stream_priority_range": (0, 0),
        "device_supports_multicast": False,
        "ubuf_built_with_mpi": False,
    }.items():
        setattr(extension, name, lambda *_, value=value: value)
    extension.FP8TensorMeta = type("FP8TensorMeta", (), {})
    module: ModuleType = extension
    return module


def _anything(name: str) -> ModuleType:
    """A module that has whatever is looked up in it."""
    module = ModuleType(name)

    def find(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        setattr(module, wanted, _enumeration(wanted))
        return getattr(module, wanted)

    module.__dict__["__getattr__"] = find
    return module


def _common(packages: Path) -> ModuleType:
    """The real one, which as in a build of the package leaves libraries alone."""
    init = packages / "transformer_engine/common/__init__.py"
    spec = importlib.util.spec_from_file_location("transformer_engine.common", init)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(init)
    common: Any = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, {"NVTE_PROJECT_BUILDING": "1"}):
        spec.loader.exec_module(common)
    common.load_framework_extension = lambda framework: None
    module: ModuleType = common
    return module
