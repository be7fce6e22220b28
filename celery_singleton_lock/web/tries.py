"""Guesses at the token have to wait after some wrong ones; nobody else has to, and nobody for long.

Counted by addresses, in this process.
"""

from __future__ import annotations

from celery_singleton_lock import clock

#: Wrong tokens of one address to which no wait belongs, and the seconds after which it may send another one then.
FREE, PAUSE = 10, 5.0

#: Addresses that are told apart; all further ones count as one.
MOST_ADDRESSES = 1000


class Tries:
    """The wrong tokens of the last minute."""

    def __init__(self) -> None:
        #: By address: when all of its wrong tokens are forgotten. Each adds a pause.
        self._forgotten_at: dict[str, float] = {}

    def wait(self, address: str) -> float:
        """Seconds until a token from this address is looked at; 0: now."""
        forgotten_at = self._forgotten_at.get(self._name(address), 0.0)
        return max(forgotten_at - (FREE - 1) * PAUSE - clock.now(), 0.0)

    def failed(self, address: str) -> None:
        """A token from there was wrong."""
        name, now = self._name(address), clock.now()
        self._forgotten_at[name] = max(self._forgotten_at.get(name, now), now) + PAUSE

    def _name(self, address: str) -> str:
        if address not in self._forgotten_at and len(self._forgotten_at) >= MOST_ADDRESSES:
            now = clock.now()
            self._forgotten_at = {name: at for name, at in list(self._forgotten_at.items()) if at > now}
        is_told_apart = address in self._forgotten_at or len(self._forgotten_at) < MOST_ADDRESSES
        return address if is_told_apart else "others"
