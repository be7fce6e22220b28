"""Identifies a process, and decides whether it has provably ended.

A pid alone says little: it is reused, and other containers and hosts have the same pids. On Linux, a process is
identified by the name of its host (which distinguishes two hosts that were resumed from one snapshot), the boot of the
host, its pid namespace, its pid, and when it was started. On other systems, nothing is ever proven.
"""

from __future__ import annotations

import hashlib
import os
import socket
from functools import lru_cache
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def own() -> str:
    """This process as "place/pid/start", where the place is a digest; empty if that cannot be found out."""
    return _identity(os.getpid())


def is_dead(process: str) -> bool:
    """Whether the process with this identity has ended: False unless it ran here and its end can be proven."""
    place, _, rest = process.partition("/")
    digits, _, start = rest.partition("/")
    if not place or place != _place() or not (digits.isascii() and digits.isdigit()):
        return False
    pid = int(digits)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # The process exists, under another user; or this was never a pid.
    state, started = _state_and_start(pid)
    return state in ("Z", "X") or (started is not None and started != start)


@lru_cache(maxsize=1)
def _identity(pid: int) -> str:
    place, (_, start) = _place(), _state_and_start(pid)
    return f"{place}/{pid}/{start}" if place and start else ""


@lru_cache(maxsize=1)
def _place() -> str:
    """This host, its current boot, and this pid namespace."""
    try:
        place = f"{socket.gethostname()} {_BOOT.read_text()} {os.readlink('/proc/self/ns/pid')}"
        return hashlib.sha256(place.encode()).hexdigest()[:12]
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str | None, str | None]:
    """A process's state, and the clock tick at which it was started, from /proc (see proc_pid_stat(5))."""
    try:
        # The name of the program, in parentheses, may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None, None
