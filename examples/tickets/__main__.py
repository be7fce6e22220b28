"""Fifty callers, ten tickets: run `python -m examples.tickets` beside `celery -A examples.tickets.tasks worker`."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from examples.tickets.tasks import STOCK, sell, sell_without_lock

CALLERS, TICKETS, SHOW = 50, 10, "tonight"


def main() -> int:
    task = sell_without_lock if "--without-lock" in sys.argv else sell
    STOCK.write_text(json.dumps({SHOW: {"tickets": TICKETS, "sold": []}}))
    with ThreadPoolExecutor(CALLERS) as callers:
        bought = list(callers.map(lambda n: task.delay(SHOW, f"caller {n}").get(timeout=120), range(CALLERS)))
    numbers = sorted(number for number in bought if number is not None)
    print(f"sold {len(numbers)} tickets: {numbers}")
    return 0 if numbers == list(range(1, TICKETS + 1)) else 1


if __name__ == "__main__":
    sys.exit(main())
