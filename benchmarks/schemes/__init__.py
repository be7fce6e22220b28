"""The ways to lock with Redis that textbooks and answers give, each as it is usually written, and ours.

All have the same face: made from clients (one, or one for each node), a name and a ttl in seconds; `acquire` says
whether the lock is ours now, without waiting; `release` gives it back, and says what it can say. They are here to be
raced (`python -m benchmarks.race`), not to be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from redis import Redis


class Scheme(Protocol):
    """One holder's view of one lock."""

    def __init__(self, clients: Sequence[Redis], name: str, ttl: float) -> None: ...

    def acquire(self) -> bool:
        """Try once."""

    def release(self) -> object:
        """Give it back. What is returned or raised is all that a holder hears of a loss."""


def all_schemes() -> Mapping[str, type[Scheme]]:
    """By the name that the table shows."""
    from benchmarks.schemes import (
        incr,
        ours,
        redlock,
        set_ex_del,
        set_px_del,
        set_px_lua,
        set_px_watch,
        setnx,
        setnx_expire,
    )

    return {
        "INCR + EXPIRE": incr.Incr,
        "SETNX, acquire time-out": setnx.SetNx,
        "SETNX + EXPIRE": setnx_expire.SetNxExpire,
        "SET NX EX + DEL": set_ex_del.SetExDel,
        "SET NX PX + DEL": set_px_del.SetPxDel,
        "SET NX PX + WATCH/MULTI": set_px_watch.SetPxWatch,
        "SET NX PX + Lua": set_px_lua.SetPxLua,
        "Redlock by the book": redlock.Redlock,
        "ours": ours.Ours,
    }
