"""Files of JSON, a line each, that several processes write and a test reads meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(path: Path | str, line: Mapping[str, object]) -> None:
    """Write a line: one call of the system, so that lines of several processes do not mix."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines so far: a reader may come in the middle of a write, and sees a part of the last line then."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]
