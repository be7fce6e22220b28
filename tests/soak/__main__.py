"""An hour of work, and what it leaves behind: `python -m tests.soak --minutes 60 --picture soak.svg`.

After a while everything must be flat: memory, threads and descriptors of the workers, keys and memory of their server.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from celery_singleton_lock import clock
from tests.soak.picture import picture
from tests.soak.soak import KEPT, Soak, grown

#: The number of points of a picture.
POINTS = 240


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--picture", type=Path, default=Path("soak.svg"), help="file for it (soak.svg)")
    options = parser.parse_args()
    samples: list[dict[str, float]] = []
    sent: list[int] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as exits:
        soak = Soak(Path(folder), exits)
        began = clock.now()
        while (at := clock.now() - began) < 60 * options.minutes:
            samples.append(soak.sample())
            sent.append(soak.sent)
            clock.sleep(60 * options.minutes / POINTS)
        left = soak.left()
        done = soak.sent - left
        wrong = grown(samples, _lately(sent, round(KEPT / 60 / options.minutes * POINTS))) + soak.wrong()[:20]
    options.picture.write_text(picture(samples, at, f"{done:,} tasks in {at / 60:.0f} min"))
    print(f"{done:,} tasks in {at / 60:.1f} min ({done / at:.0f} a second), {left} in the queue at the end")
    print(_table(samples), *wrong, f"picture: {options.picture}", sep="\n")
    return min(len(wrong), 1)


def _lately(sent: Sequence[int], steps: int) -> list[int]:
    """For each sample, how many messages were sent in the `steps` samples before it."""
    return [count - sent[max(number - max(steps, 1), 0)] for number, count in enumerate(sent)]


def _table(samples: Sequence[dict[str, float]]) -> str:
    shares = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
    rows = [["", *(f"after {share:.0%}" for share in shares)], ["---"] * (len(shares) + 1)]
    for name in samples[0]:
        values = [samples[int((len(samples) - 1) * share)][name] for share in shares]
        rows.append([name, *(f"{value:,.1f}" if name.startswith("MB") else f"{value:,.0f}" for value in values)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
