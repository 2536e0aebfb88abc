"""What a row of the table of features says; the rows are in `features`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tests.distributed.configs import Config

__all__ = [
    "IDENTICAL",
    "IN_BACKWARD",
    "LAYOUT",
    "SCHEDULES",
    "VALIDATED",
    "Feature",
    "Kind",
    "Promise",
    "typed",
]

LAYOUT = "--pipeline-model-parallel-layout"
VALIDATED = ("--optimizer-post-validation", "--post-validation-window", "0")
IN_BACKWARD = ("--zero-bubble-recompute", "in-backward")
SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "auto")
"""The columns of the table."""

type Kind = Literal["identical", "tolerance", "rejected", "untested"]


@dataclass(frozen=True, slots=True)
class Promise:
    """What a schedule promises with a feature, against Megatron's own 1F1B under the same flags."""

    kind: Kind
    flag: str = ""
    """Of a rejection: what its message names."""
    why: str = ""
    """Of all but bit-identity: for people."""


IDENTICAL = Promise("identical")


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table."""

    title: str
    group: str
    config: Config
    """For schedules with one chunk a stage. It clips gradients, as Megatron does by default."""
    of_v: Mapping[str, object] = field(default_factory=dict)
    """What a V needs otherwise, by the names of the configuration's fields."""
    promises: Mapping[str, Promise] = field(default_factory=dict)
    """By schedule, where it is not bit-identity."""
    ours: tuple[str, ...] = ()
    """Flags of our own."""
    note: str = ""
    """For people, beside the title."""
    flags_as_typed: str = ""
    """Where no configuration has them."""
    layout_of_v: str = ""
    """The same model in as many parts as a V has."""

    def promise(self, schedule: str) -> Promise:
        return self.promises.get(schedule, IDENTICAL)

    @property
    def validated(self) -> bool:
        """Whether steps are taken first and checked afterwards."""
        return VALIDATED[0] in self.ours

    @property
    def recomputes_in_passes(self) -> bool:
        """Whether recomputation is a pass of its own (R), as full recomputation is by default."""
        elsewhere = {*IN_BACKWARD, "--distribute-saved-activations"}
        return "full" in self.config.extra and not elsewhere & {*self.ours, *self.config.extra}

    def config_for(self, schedule: str) -> Config:
        """A V needs a layer for each of its two chunks a stage, draws other random numbers, and
        adds the norm in another order, so that it is compared without dropout and clipping."""
        if schedule != "zb-v":
            return self.config
        layers = self.config.layers
        if not self.layout_of_v:
            layers = max(layers, 2 * self.config.pp)
        fields = {"dropout": 0.0, "clip_grad": 0.0, "layers": layers, **self.of_v}
        return replace(self.config, **fields)  # type: ignore[arg-type]

    def flags(self, schedule: str) -> tuple[str, ...]:
        """What only our side is given."""
        layout = (LAYOUT, self.layout_of_v) if schedule == "zb-v" and self.layout_of_v else ()
        return (*self.ours, *layout)


def typed(config: Config) -> str:
    """The flags of a configuration that make it what it is, as a user types them."""
    plain = Config(iterations=config.iterations, clip_grad=config.clip_grad).flags()
    given, shown = config.flags(), []
    position = 0
    while position < len(given):
        end = position + 1
        while end < len(given) and not given[end].startswith("--"):
            end += 1
        words = given[position:end]
        position = end
        if words[0] in UNSAID or any(
            plain[at : at + len(words)] == words for at in range(len(plain))
        ):
            continue
        shown.append(" ".join(words))
    return " ".join(shown)


UNSAID = ("--global-batch-size", "--num-layers", "--lr", "--attention-dropout", "--hidden-dropout")
"""What a configuration has because its size is a test's."""
