"""`python -m benchmarks [--quick] [--only NAME]`: measure, and write benchmarks/results/."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import time

from benchmarks import measure, report


def main() -> None:
    """Run the benchmarks one after another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=report.ORDER, action="append", help="only this benchmark; may be repeated")
    parser.add_argument("--quick", action="store_true", help="short runs, for a first look (about 4 minutes)")
    options = parser.parse_args()
    # The other libraries log each error of a server that is broken on purpose; do not show that here.
    logging.getLogger().addHandler(logging.NullHandler())
    version = measure.server_version()
    for name in options.only or report.ORDER:
        begun = time.monotonic()
        result = importlib.import_module(f"benchmarks.{name}").run(quick=options.quick)
        path = measure.save(result, quick=options.quick, server_version=version)
        print(report.section(json.loads(path.read_text())))
        print(f"({name}: {time.monotonic() - begun:.0f} s)\n", flush=True)
    print(report.write())


if __name__ == "__main__":
    main()
