"""What a partition divides: a model as a row of layers, each with its own times and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Literal, Self

from zero_bubble.costs import Costs
from zero_bubble.placement import Placement

__all__ = ["Layer", "LayerKind", "Model"]

type LayerKind = Literal["embedding", "transformer", "loss"]

_LETTER: Mapping[LayerKind, str] = {"embedding": "E", "transformer": "t", "loss": "L"}
_FIELDS = ("embedding", "layers", "loss", "t_comm")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer for one microbatch. ValueError for a negative or infinite number, m_w > m_b."""

    kind: LayerKind
    """``loss`` is Megatron's word for the last norm, the LM head and the loss together."""
    t_f: float
    """Time of F in ms."""
    t_b: float
    """Time of B in ms."""
    t_w: float
    """Time of W in ms."""
    m_b: float
    """Memory one microbatch holds from the start of its F to the end of its B."""
    m_w: float
    """The part of ``m_b`` that stays until the end of its W."""
    weight_memory: float = 0.0
    """What the layer holds all the time: weights, gradients, states of the optimizer."""

    def __post_init__(self) -> None:
        if self.kind not in _LETTER:
            raise ValueError(f"kind {self.kind!r} of a layer: known are {', '.join(_LETTER)}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"{name} of the {self.kind} layer must be a finite number, at least 0, not "
                    f"{value}"
                )
        if self.m_w > self.m_b:
            raise ValueError(
                f"m_w of the {self.kind} layer is {self.m_w:.6g}, more than its m_b "
                f"{self.m_b:.6g}: it is the part of m_b that stays until W"
            )

    @property
    def work(self) -> float:
        """Time of F, B and W together, in ms."""
        return self.t_f + self.t_b + self.t_w


_NUMBERS = tuple(one.name for one in fields(Layer) if one.name != "kind")


@dataclass(frozen=True, slots=True)
class Model:
    """Layers in model order: an embedding, transformer layers, a loss.

    That is what Megatron asks of a layout, too. ValueError for any other row of layers.
    """

    layers: tuple[Layer, ...]
    t_comm: float = 0.0
    """Time of a message between two stages in ms; it is the same wherever the model is cut."""

    def __post_init__(self) -> None:
        kinds = [layer.kind for layer in self.layers]
        if kinds != ["embedding", *["transformer"] * (len(kinds) - 2), "loss"] or len(kinds) < 3:
            raise ValueError(
                "a model is an embedding, at least one transformer layer, and a loss, in this "
                f"order, not {', '.join(map(str, kinds)) or 'no layers'}"
            )
        if not (math.isfinite(self.t_comm) and self.t_comm >= 0):
            raise ValueError(f"t_comm must be a finite number, at least 0, not {self.t_comm}")

    @property
    def work(self) -> float:
        """Time of F, B and W of all layers for one microbatch, in ms."""
        return math.fsum(layer.work for layer in self.layers)

    @property
    def num_layers(self) -> int:
        """Transformer layers, Megatron's ``--num-layers``."""
        return len(self.layers) - 2

    def parts(self, sizes: Sequence[int]) -> list[tuple[Layer, ...]]:
        """The layers of each position, if it gets so many; ValueError unless they add up."""
        if min(sizes, default=0) < 1 or sum(sizes) != len(self.layers):
            raise ValueError(
                f"sizes {tuple(sizes)}: expected numbers of layers, at least 1 each, with sum "
                f"{len(self.layers)} (embedding and loss included)"
            )
        rest = iter(self.layers)
        return [tuple(next(rest) for _ in range(size)) for size in sizes]

    def costs(self, placement: Placement, sizes: Sequence[int]) -> Costs:
        """Times and memory of every chunk, if position k of the placement gets sizes[k] layers."""
        parts = self.parts(sizes)

        def table(name: str) -> tuple[tuple[float, ...], ...]:
            return tuple(
                tuple(math.fsum(getattr(layer, name) for layer in parts[one]) for one in held)
                for held in placement.positions
            )

        return Costs(
            t_f=table("t_f"),
            t_b=table("t_b"),
            t_w=table("t_w"),
            m_b=table("m_b"),
            m_w=table("m_w"),
            t_comm=self.t_comm,
        )

    def weight_memory(self, placement: Placement, sizes: Sequence[int]) -> tuple[float, ...]:
        """What each stage holds all the time."""
        parts = self.parts(sizes)
        return tuple(
            math.fsum(layer.weight_memory for one in held for layer in parts[one])
            for held in placement.positions
        )

    def even_sizes(self, chunks: int) -> tuple[int, ...] | None:
        """Megatron's own partition; None if the transformer layers do not divide into the chunks.

        The embedding comes to the first chunk and the loss to the last, on top of their share.
        """
        share, rest = divmod(self.num_layers, chunks)
        if rest:
            return None
        sizes = [share] * chunks
        sizes[0] += 1
        sizes[-1] += 1
        return tuple(sizes)

    def layout(self, sizes: Sequence[int]) -> str:
        """Megatron's ``--pipeline-model-parallel-layout``, such as ``Et*3|(t*4|)*6t*2L``.

        Parts come in model order. Megatron gives part k to rank k mod p, which is linear or
        interleaved placement.
        """
        parts = [_letters(part) for part in self.parts(sizes)]
        text = ""
        for part, run in groupby(parts):
            count = sum(1 for _ in run)
            text += f"({part}|)*{count}" if count > 2 else f"{part}|" * count
        return text.removesuffix("|")

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """The model of a JSON object; ValueError names the field and what is expected there.

        ::

            {"embedding": {"t_f": 0.2, "t_w": 0.2}, "t_comm": 0.1,
             "layers": {"count": 32, "t_f": 1, "t_b": 1, "t_w": 1, "m_b": 1, "m_w": 0.5},
             "loss": {"t_f": 1, "t_b": 1, "t_w": 1, "m_b": 0.2}}

        ``layers`` may also be a list of such objects, each of one layer or of ``count`` alike.
        ``m_w`` is ``m_b`` if it is left out, ``weight_memory`` is 0, and so is all else of an
        embedding or a loss. Either of these may be left out: it costs nothing then.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"expected an object with {', '.join(_FIELDS)}, not {data!r:.80}")
        if unknown := sorted(set(data) - set(_FIELDS)):
            raise ValueError(f"unknown field {unknown[0]!r}; known: {', '.join(_FIELDS)}")
        if "layers" not in data:
            raise ValueError("field 'layers' is missing: expected the times of its layers")
        layers = data["layers"]
        if isinstance(layers, Mapping):
            middle = [*_layers("transformer", layers, "layers")]
        elif isinstance(layers, list):
            middle = [
                layer
                for index, one in enumerate(layers)
                for layer in _layers("transformer", one, f"layers[{index}]")
            ]
        else:
            raise ValueError(
                "field 'layers': expected a list of layers, or one with its count, not "
                f"{layers!r:.80}"
            )
        return cls(
            (
                *_layers("embedding", data.get("embedding", {}), "embedding"),
                *middle,
                *_layers("loss", data.get("loss", {}), "loss"),
            ),
            _number(data.get("t_comm", 0.0), "t_comm"),
        )


def _letters(part: Sequence[Layer]) -> str:
    text = ""
    for kind, run in groupby(layer.kind for layer in part):
        count = sum(1 for _ in run)
        text += _LETTER[kind] + (f"*{count}" if count > 1 else "")
    return text


def _layers(kind: LayerKind, data: object, field: str) -> Iterator[Layer]:
    """The layers that one object stands for."""
    known = [*_NUMBERS, "count"] if kind == "transformer" else [*_NUMBERS]
    if not isinstance(data, Mapping):
        raise ValueError(f"field {field!r}: expected an object with t_f, ..., not {data!r:.80}")
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(
            f"field {field!r}: unknown field {unknown[0]!r}; known: {', '.join(known)}"
        )
    count = data.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"field '{field}.count': expected a whole number >= 1, not {count!r}")
    values = {name: _number(data[name], f"{field}.{name}") for name in _NUMBERS if name in data}
    for name in ("t_f", "t_b", "t_w", "m_b"):
        if name not in values and kind == "transformer":
            raise ValueError(f"field '{field}.{name}' is missing: expected a number")
        values.setdefault(name, 0.0)
    values.setdefault("m_w", values["m_b"])
    try:
        layer = Layer(kind, **values)
    except ValueError as error:
        raise ValueError(f"field {field!r}: {error}") from error
    for _ in range(count):
        yield layer


def _number(value: object, field: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"field {field!r}: expected a number, not {value!r:.80}")
    return float(value)
