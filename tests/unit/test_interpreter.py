"""The interpreter: the program's order, the model's gradients, and errors that say where."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron.zero_bubble.errors import PipelineError
from megatron.zero_bubble.runtime import transport as transport_module
from megatron.zero_bubble.runtime.interpreter import Event, Interpreter
from megatron.zero_bubble.runtime.transport import Receipt, Transport
from tests.unit.orders import parse, random_order
from zero_bubble.builders import BUILDERS, build
from zero_bubble.check import check
from zero_bubble.lower import lower
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.program import Channel, Finalize, Flow, HandOver, Instruction, Program, Run
from zero_bubble.schedule import Kind, Pass, Schedule

PATIENCE_S = 60.0  # only a deadlock waits this long
SIZE = 3


class Model:
    """A chain of ``x -> tanh(weight * x)``, a link a position; the loss is the sum at its end."""

    def __init__(self, positions: int, microbatches: int) -> None:
        draw = torch.Generator().manual_seed(1)
        shape = positions, SIZE
        self.weights = torch.randn(shape, generator=draw, dtype=torch.float64)
        self.data = torch.randn(microbatches, SIZE, generator=draw, dtype=torch.float64)

    def gradients(self) -> torch.Tensor:
        """[positions, SIZE], by autograd through the whole chain at once."""
        weights = self.weights.clone().requires_grad_()
        value = self.data
        for weight in weights:
            value = torch.tanh(weight * value)
        value.sum().backward()
        assert weights.grad is not None
        return weights.grad


class Line:
    """A channel in memory: the n-th receive gets the n-th message."""

    def __init__(self) -> None:
        self.messages: list[torch.Tensor] = []
        self.posted = 0
        self.changed = threading.Condition()


@dataclass
class MemoryTransport:
    """What the stages of one pipeline share, in place of `Transport`."""

    lines: dict[Channel, Line]

    def send(self, channel: Channel, message: torch.Tensor) -> None:
        line = self.lines[channel]
        with line.changed:
            line.messages.append(message.clone())
            line.changed.notify_all()

    def receive(self, channel: Channel, buffer: torch.Tensor) -> Receipt:
        line = self.lines[channel]
        line.posted += 1
        number: Any = line.posted - 1
        return Receipt(channel, buffer, number)

    def wait(self, receipt: Receipt) -> torch.Tensor:
        line = self.lines[receipt.channel]
        number: Any = receipt.work
        with line.changed:
            arrived = line.changed.wait_for(lambda: len(line.messages) > number, PATIENCE_S)
            assert arrived, f"nothing came on {receipt.channel}"
            return receipt.buffer.copy_(line.messages[number])

    def drain(self) -> None:
        pass


@dataclass
class ChainCompute:
    """One stage's part of a `Model`; notes each call."""

    model: Model
    held: tuple[int, ...]
    """Position of each chunk."""
    split: frozenset[int]
    forward_only: bool = False
    calls: list[str] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    outputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    most_outputs: int = 0
    _waiting: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, Any]] = field(
        default_factory=dict
    )
    _leaves: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def forward(
        self, chunk: int, microbatch: int, input: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        position = self.held[chunk]
        self.calls.append(f"{chunk}F{microbatch}")
        if input is None:
            assert position == 0
            input = self.model.data[microbatch]
        else:
            assert position > 0
            assert input.requires_grad != self.forward_only
        weight = self.model.weights[position].clone().requires_grad_(not self.forward_only)
        output = torch.tanh(weight * input)
        self._leaves[chunk, microbatch] = weight
        self.outputs.append(weakref.ref(output))
        self.most_outputs = max(self.most_outputs, sum(one() is not None for one in self.outputs))
        if position == len(self.model.weights) - 1:
            self.losses.append(output.detach().sum().item())
            return output, None
        return output, output.detach()

    def backward(
        self,
        chunk: int,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        split, weight = chunk in self.split, self._leaves.pop((chunk, microbatch))
        self.calls.append(f"{chunk}{'I' if split else 'B'}{microbatch}")
        if output_grad is None:
            assert self.held[chunk] == len(self.model.weights) - 1
            output_grad = torch.ones_like(output)
        wanted = [one for one in (input, None if split else weight) if one is not None]
        found = list(
            torch.autograd.grad(output, wanted, output_grad, retain_graph=split) if wanted else ()
        )
        if split:
            self._waiting[chunk, microbatch] = output, weight, output_grad
        else:
            self._add(chunk, found.pop())
        return found.pop() if input is not None else None

    def recompute(self, chunk: int, microbatch: int) -> None:
        self.calls.append(f"{chunk}R{microbatch}")

    def weight(self, chunk: int, microbatch: int, part: int = 0, parts: int = 1) -> None:
        self.calls.append(f"{chunk}W{microbatch}")
        output, weight, output_grad = self._waiting.pop((chunk, microbatch))
        self._add(chunk, torch.autograd.grad(output, weight, output_grad)[0])

    def buffer(self, flow: Flow) -> torch.Tensor:
        return torch.empty(SIZE, dtype=torch.float64)

    def finalize(self) -> None:
        self.calls.append("FINALIZE")

    def _add(self, chunk: int, gradient: torch.Tensor) -> None:
        position = self.held[chunk]
        self.gradients[position] = self.gradients.get(position, 0) + gradient


def execute(
    program: Program, *, forward_only: bool = False
) -> tuple[Model, list[ChainCompute], list[Interpreter]]:
    """Run all stages, each in a thread of its own."""
    placement = program.placement
    model = Model(placement.num_positions, program.num_microbatches)
    channels = {
        one.channel for row in program.instructions for one in row if hasattr(one, "channel")
    }
    transport: Any = MemoryTransport({channel: Line() for channel in channels})
    computes, interpreters = [], []
    for stage, row in enumerate(program.instructions):
        runs = [one.what for one in row if isinstance(one, Run)]
        split = frozenset(one.chunk for one in runs if one.kind is Kind.W)
        computes.append(ChainCompute(model, placement.positions[stage], split, forward_only))
        interpreters.append(
            Interpreter(
                stage,
                computes[-1],
                transport,
                split_chunks=split,
                keep_for_backward=not forward_only,
            )
        )
    with ThreadPoolExecutor(len(interpreters)) as pool:
        started = [
            pool.submit(one.run, row)
            for one, row in zip(interpreters, program.instructions, strict=True)
        ]
        for one in started:
            one.result()
    return model, computes, interpreters


def check_execution(schedule: Schedule) -> None:
    assert check(schedule) == []
    program = lower(schedule)
    model, computes, interpreters = execute(program)
    for stage, (compute, interpreter) in enumerate(zip(computes, interpreters, strict=True)):
        expected = []
        for one in schedule.passes[stage]:
            if one.kind is Kind.BW and one.chunk in compute.split:
                expected += [f"{one.chunk}I{one.microbatch}", f"{one.chunk}W{one.microbatch}"]
            else:
                expected.append(str(one))
        assert compute.calls == [*expected, "FINALIZE"]
        assert tuple(event.instruction for event in interpreter.log) == program.instructions[stage]
    found = {position: one for compute in computes for position, one in compute.gradients.items()}
    by_autograd = model.gradients()
    assert sorted(found) == list(range(len(by_autograd)))
    for position, gradient in found.items():
        torch.testing.assert_close(gradient, by_autograd[position])


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 5), (4, 9)])
def test_known_schedules_run_in_order_and_give_the_gradients_of_the_whole_model(
    name: str, stages: int, microbatches: int
) -> None:
    check_execution(build(name, stages, microbatches))


V = """
0F0 0F1 1F0 1I0 1F1 1I1 1W0 0I0 0W0 1W1 0I1 0W1
0F0 1F0 0F1 1F1 1I0 0I0 1I1 0I1 1W0 0W0 1W1 0W1
"""


def test_a_v_hands_over_at_its_turn_without_a_message() -> None:
    schedule = parse(v_shape(2), 2, V)
    check_execution(schedule)
    turns = [one for one in lower(schedule).instructions[1] if isinstance(one, HandOver)]
    assert [str(one) for one in turns] == ["0TURN_F0", "0TURN_F1", "1TURN_B0", "1TURN_B1"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "placement",
    [linear(3), v_shape(3), interleaved(2, 2), Placement(((0, 2), (1, 3, 4))), v_shape(1)],
    ids=lambda placement: placement.name,
)
def test_any_legal_order_gives_the_gradients_of_the_whole_model(
    placement: Placement, seed: int
) -> None:
    check_execution(random_order(placement, 3, seed))


def test_a_fused_backward_of_a_split_chunk_runs_b_and_then_w() -> None:
    schedule = parse(linear(2), 2, "0F0 0F1 0I0 0B1 0W0\n0F0 0B0 0F1 0B1")
    _, (first, last), _ = execute(lower(schedule))
    assert first.calls == ["0F0", "0F1", "0I0", "0I1", "0W1", "0W0", "FINALIZE"]
    assert last.calls == ["0F0", "0B0", "0F1", "0B1", "FINALIZE"]  # its chunk has no W anywhere


def test_forward_only_keeps_nothing_and_gives_the_losses() -> None:
    program = lower(build("gpipe", 3, 4), forward_only=True)
    model, computes, _ = execute(program, forward_only=True)
    value = model.data
    for weight in model.weights:
        value = torch.tanh(weight * value)
    assert computes[-1].losses == pytest.approx(value.sum(dim=1).tolist())
    assert [one.most_outputs for one in computes] == [1, 1, 1]
    assert all(compute.calls == ["0F0", "0F1", "0F2", "0F3"] for compute in computes)


def test_1f1b_keeps_as_many_outputs_as_stages_are_left() -> None:
    """The paper's activation memory of 1F1B, p - i microbatches on stage i counted from 0."""
    _, computes, _ = execute(lower(build("1f1b", 4, 9)))
    assert [compute.most_outputs for compute in computes] == [4, 3, 2, 1]


def test_an_observer_hears_of_every_instruction_before_and_after_it() -> None:
    heard: list[tuple[str, Instruction]] = []
    compute = ChainCompute(Model(1, 2), (0,), frozenset({0}))

    class Listener:
        def before(self, instruction: Instruction) -> None:
            heard.append(("before", instruction))

        def after(self, instruction: Instruction) -> None:
            # Its event is there already.
            assert interpreter.log[-1].instruction == instruction
            heard.append(("after", instruction))

    (row,) = lower(parse(linear(1), 2, "0F0 0F1 0I0 0I1 0W0 0W1")).instructions
    transport: Any = MemoryTransport({})
    interpreter = Interpreter(0, compute, transport, frozenset({0}), observer=Listener())
    interpreter.run(row)
    assert heard == [(when, one) for one in row for when in ("before", "after")]
    assert isinstance(interpreter.log[0], Event)


@pytest.mark.parametrize("what", ["0F1", "0I0", "0W0", "0B1", "FINALIZE"])
def test_an_exception_gets_a_note_with_stage_and_pass(what: str) -> None:
    class Failing(ChainCompute):
        def _fail_in(self, name: str) -> None:
            if name == what.replace("B", "I"):
                raise ZeroDivisionError("in the model")

        def forward(self, chunk: int, microbatch: int, *rest: Any) -> Any:
            self._fail_in(f"{chunk}F{microbatch}")
            return super().forward(chunk, microbatch, *rest)

        def backward(self, chunk: int, microbatch: int, *rest: Any) -> Any:
            self._fail_in(f"{chunk}I{microbatch}")
            return super().backward(chunk, microbatch, *rest)

        def weight(self, chunk: int, microbatch: int, part: int = 0, parts: int = 1) -> None:
            self._fail_in(f"{chunk}W{microbatch}")
            super().weight(chunk, microbatch, part, parts)

        def finalize(self) -> None:
            self._fail_in("FINALIZE")

    names = ["0F0", "0F1", "0I0", "0W0", "0B1"]
    row: list[Instruction] = [*(Run(Pass.parse(name)) for name in names), Finalize()]
    transport: Any = MemoryTransport({})
    compute = Failing(Model(1, 2), (0,), frozenset({0}))
    interpreter = Interpreter(7, compute, transport, frozenset({0}))
    with pytest.raises(ZeroDivisionError, match="in the model") as caught:
        interpreter.run(row)
    if what == "FINALIZE":
        where = "instruction FINALIZE"
    else:
        one = Pass.parse(what)
        where = f"pass {what} ({one.kind} of microbatch {one.microbatch}, chunk 0)"
    assert caught.value.__notes__ == [f"zero-bubble: raised on stage 7, {where}"]
    assert [str(event.instruction) for event in interpreter.log] == (
        [*names, "FINALIZE"][: [*names, "FINALIZE"].index(what)]
    )


class FailingBackend:
    """torch.distributed for one stage of two, with a peer that answers until it is cut off."""

    def __init__(self, failing: str) -> None:
        self.failing, self.cut, self.error = failing, False, ""

    def new_group(self, *args: Any, **options: Any) -> Any:
        return object()

    def get_world_size(self) -> int:
        return 2

    def all_gather_object(self, into: list[Any], one: Any) -> None:
        into[:] = [one] * len(into)

    def isend(self, *args: Any, **options: Any) -> Any:
        self._fail("isend")
        return _Work(self, "drain")

    def irecv(self, *args: Any, **options: Any) -> Any:
        self._fail("irecv")
        return _Work(self, "wait")

    def _fail(self, call: str) -> None:
        if self.cut and self.failing == call:
            raise RuntimeError(self.error)


@dataclass
class _Work:
    backend: FailingBackend
    call: str

    def wait(self, timeout: Any) -> bool:
        self.backend._fail(self.call)
        return True

    def is_completed(self) -> bool:
        return False


CLOSED = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:21228"
TIMED_OUT = "[unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("failing", "where", "channel"),
    [
        ("irecv", "instruction 0RECV_B0", "B:1->0"),
        ("isend", "instruction 0SEND_F0", "F:0->1"),
        ("wait", r"pass 0I0 \(B of microbatch 0, chunk 0\)", "B:1->0"),
        ("drain", "after its last pass", "F:0->1"),
    ],
)
@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (CLOSED, "lost the connection of", "that stage's process ended"),
        (TIMED_OUT, r"waited 2.5 s \(the limit\) on", "that stage is stuck"),
    ],
    ids=["closed", "timed out"],
)
def test_an_error_of_the_backend_names_stage_pass_channel_and_peer(
    failing: str,
    where: str,
    channel: str,
    error: str,
    before: str,
    after: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = FailingBackend(failing)
    monkeypatch.setattr(transport_module, "dist", backend)
    program = lower(build("zb-h1", 2, 1))
    transport = Transport(
        [Channel(0, 1, Flow.FORWARD), Channel(1, 0, Flow.BACKWARD)],
        stage=0,
        ranks=[4, 6],
        backend="gloo",
        device=torch.device("cpu"),
        wait_limit=2.5,
    )
    backend.cut, backend.error = True, error
    interpreter = Interpreter(
        0, ChainCompute(Model(2, 1), (0,), frozenset({0})), transport, frozenset({0})
    )
    expected = (
        rf"^stage 0, {where}: {before} channel {channel}, whose other end is stage 1 "
        rf"\(rank 6\): {after}; look at its own output$"
    )
    with pytest.raises(PipelineError, match=expected) as caught:
        interpreter.run(program.instructions[0])
    # What the backend said comes with it.
    cause = caught.value.__cause__
    assert cause is not None
    assert str(cause.__cause__) == error
