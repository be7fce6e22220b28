"""Files of JSON lines that several processes write while a test reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(path: Path | str, line: Mapping[str, object]) -> None:
    """Write a line with one system call, so that lines of several processes do not mix."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def read(path: Path) -> list[dict[str, Any]]:
    """The complete lines so far: a reader that comes in the middle of a write sees only a part of the last line."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]
