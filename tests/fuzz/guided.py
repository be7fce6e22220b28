"""The same cases, guided by the code that they cover: `python -m tests.fuzz.guided TARGET -runs=100000`.

The engine is libFuzzer. Needs `atheris`, which is available for Linux and Python 3.11 or newer.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["celery_singleton_lock"]):
    from tests.fuzz.running import once, quiet
    from tests.fuzz.targets import TARGETS


def main() -> None:
    target = sys.argv.pop(1)
    quiet()
    with TARGETS[target][0]() as case:
        atheris.Setup(sys.argv, lambda data: once(target, case, data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
