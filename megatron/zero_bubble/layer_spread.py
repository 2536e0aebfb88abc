"""How many layers each chunk gets, and Megatron's way to write that down."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.arrangement import Arrangement

__all__ = ["describe", "layout_of", "padded", "spread"]


def spread(
    num_layers: int, arrangement: Arrangement, *, embedding: bool = False, loss: bool = False
) -> tuple[int, ...]:
    """Layers of each chunk, by position in the model.

    All chunks get as many as possible alike, which is Megatron's own split where they divide. What
    is left goes to the ranks that have least, and to the chunks with the embedding and the loss
    last, so that these get one layer less (as in the paper's models of 22 or 30 layers). Among
    equals the later chunk gets it: it holds its activations for a shorter time.

    Args:
        embedding: count the embedding as a layer (``--account-for-embedding-in-pipeline-split``).
        loss: count the loss as a layer (``--account-for-loss-in-pipeline-split``).
    """
    placement = arrangement.placement
    positions = placement.num_positions
    last = positions - 1
    base, left = divmod(num_layers + embedding + loss, positions)
    counts = [base] * positions
    stages = [placement.owner(position)[0] for position in range(positions)]

    def preference(position: int) -> tuple[int, int, int]:
        end = 2 if position == last else int(position == 0)
        here = stages[position]
        on_stage = sum(count for count, stage in zip(counts, stages, strict=True) if stage == here)
        return end, on_stage, -position

    for _ in range(left):
        even = (position for position in range(positions) if counts[position] == base)
        counts[min(even, key=preference)] += 1
    counts[0] -= embedding
    counts[last] -= loss
    return tuple(counts)


def layout_of(counts: Sequence[int], predictions: int = 0) -> str:
    """The value of ``--pipeline-model-parallel-layout``, in model order.

    Args:
        predictions: layers of multi-token prediction, which go before the loss.
    """
    return "E" + "|".join("t" * count for count in counts) + "m" * predictions + "L"


def padded(layout: str, arrangement: Arrangement) -> str:
    """The same with parts for the empty chunks of ranks that hold fewer: Megatron counts parts."""
    chunks = len(arrangement.ranks) * arrangement.chunks_a_rank
    return layout + "|" * (chunks - arrangement.placement.num_positions)


def describe(parts: Sequence[str], arrangement: Arrangement) -> str:
    """For people: what each pipeline rank holds, chunk by chunk; layers are counted from 1.

    ``parts`` are those of a layout, in model order.
    """
    first, texts = 1, []
    for part in parts:
        layers = part.count("t")
        words = ["embedding"] if "E" in part else []
        if layers:
            many = f"layers {first}-{first + layers - 1}"
            words.append(many if layers > 1 else f"layer {first}")
        words += ["multi-token prediction"] if "m" in part else []
        words += ["loss"] if "L" in part else []
        texts.append(", ".join(words) or "no layer")
        first += layers
    ranks = []
    for rank, held in enumerate(arrangement.positions):
        chunks = (texts[position] for position in held if position is not None)
        ranks.append(f"rank {rank} holds {' | '.join(chunks)}")
    return "; ".join(ranks)
