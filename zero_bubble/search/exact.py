"""The exact scheduler: the best order there is, or how far from it the best one known can be."""

from __future__ import annotations

from collections.abc import Callable

from zero_bubble.schedule import Schedule
from zero_bubble.search.exact_cpsat import solve_cpsat
from zero_bubble.search.exact_highs import solve_highs
from zero_bubble.search.exact_run import TOLERANCE, Progress
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution

__all__ = ["SOLVERS", "TOLERANCE", "Progress", "solve", "solve_cpsat", "solve_highs"]

SOLVERS = ("cp-sat", "highs")
"""Solvers by name; both are in the extra ``solver``."""


def solve(
    problem: Problem,
    incumbent: Schedule,
    *,
    solver: str = "cp-sat",
    time_limit: float = 60.0,
    bit_identical: bool = True,
    lower_bound: float = 0.0,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The cheapest schedule of a problem, found from a known one (paper, appendix G).

    The schedule is never worse than ``incumbent``, which must be legal, and is returned if nothing
    better is found within ``time_limit`` seconds. The bound is the best one proven; when the search
    is completed it equals the cost, up to a relative `TOLERANCE`.

    ``bit_identical`` keeps a chunk's F's, B's and W's in microbatch order, which is also what makes
    the search fast. Without it only the names of microbatches are fixed, and that every stage
    begins with the first: bounds hold for orders of that kind. A placement whose stages' first
    chunks are not the first of the model can have an order whose bound stays below its cost, since
    there a stage would gain by beginning later than it can, which no runtime does.

    Before a solver is asked, all that the incumbent's cost and the limits imply is worked out. That
    alone can prove an incumbent optimal; with no time left after it, no solver is needed.

    ``lower_bound`` (ms) is a bound that is known to hold: the search ends when it is met.
    ``progress`` is called whenever the cost falls or the bound rises. ValueError for an unknown or
    missing solver, an incumbent that is illegal or of another problem, a bound above its cost, and
    more than 10,000 passes.
    """
    if solver not in SOLVERS:
        raise ValueError(f"no solver is called {solver!r}; known: {', '.join(SOLVERS)}")
    search = solve_cpsat if solver == "cp-sat" else solve_highs
    return search(
        problem,
        incumbent,
        time_limit=time_limit,
        bit_identical=bit_identical,
        lower_bound=lower_bound,
        progress=progress,
    )
