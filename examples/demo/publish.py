"""One of the demo's publishers: sends the same jobs over and over until the demo says stop."""

from __future__ import annotations

import time

from examples.demo.tasks import exclusive, plain, record

#: Seconds between two sends, and seconds that the jobs take.
EVERY, LONG = 0.35, 0.9

if __name__ == "__main__":
    for turn in range(100):
        if record.exists("stop"):
            break
        exclusive.apply_async(("report", LONG), expires=EVERY)
        if turn % 3 == 0:
            plain.apply_async(("plain job", LONG), expires=EVERY)
        time.sleep(EVERY)
