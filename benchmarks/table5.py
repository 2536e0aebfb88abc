"""The paper's Table 5 again: bubble rates of 1F1B, ZB-H1 and ZB-H2 beside the published ones.

Run ``python benchmarks/table5.py``. Exits with 1 if any rate differs at 4 decimals.
"""

from __future__ import annotations

import sys

from zero_bubble.builders import build
from zero_bubble.costs import paper_profiles
from zero_bubble.simulate import simulate

NAMES = ("1f1b", "zb-h1", "zb-h2")


def main() -> int:
    differing = 0
    heading = "".join(f"{name:>10}   paper" for name in NAMES)
    print(f"{'model':<8}{'stages':>6}{'microbatches':>14}{heading}")
    for profile in paper_profiles():
        cells = ""
        for name in NAMES:
            schedule = build(name, profile.stages, profile.microbatches)
            rate = f"{simulate(schedule, profile.costs).bubble_rate:.4f}"
            published = f"{profile.bubble_rates[name]:.4f}"
            differing += rate != published
            cells += f"{rate:>10}{published:>7}{' ' if rate == published else '!'}"
        print(f"{profile.model:<8}{profile.stages:>6}{profile.microbatches:>14}{cells}")
    print(f"{differing} of {len(NAMES) * len(paper_profiles())} rates differ at 4 decimals")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
