"""One rank of one_gpu_pipeline.py.

python tools/profile/one_gpu/worker.py PLAN.json [Megatron's flags]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    # In place of this script's own directory, whose modules nobody should find by chance.
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    from tools.profile.one_gpu.device import rank_environment
    from tools.profile.one_gpu.plan import Plan

    plan = Plan.load(Path(sys.argv.pop(1)))
    os.environ.update(rank_environment(plan.device, int(os.environ["RANK"])))
    # Only now: torch and Megatron read these variables when they are imported.
    from tools.profile.one_gpu.turns import run

    run(plan)


if __name__ == "__main__":
    main()
