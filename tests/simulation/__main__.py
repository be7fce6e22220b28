"""`python -m tests.simulation [first seed] [how many]`."""

from __future__ import annotations

import os
import sys
import time


def main() -> None:
    from tests.simulation.plan import draw
    from tests.simulation.simulate import prepare, simulate

    first, count = int(sys.argv[1]), int(sys.argv[2])
    prepare()
    began, failed = time.process_time(), 0
    for seed in range(first, first + count):
        result = simulate(draw(seed))
        if result.failure is not None:
            failed += 1
            print(seed, result.plan.pool, result.plan.nodes, result.failure, flush=True)
        if count == 1:
            print(result.plan)
            for line in result.trace:
                print("%9.4f %-14s %-18s %s" % line)
    print(count, "seeds,", failed, "failed,", (time.process_time() - began) / count, "s CPU each")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])  # noqa: S606
    main()
