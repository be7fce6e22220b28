"""Slows down guesses at the token: after some wrong tokens, an address has to wait, but never for long.

Wrong tokens are counted by address, in this process.
"""

from __future__ import annotations

from celery_singleton_lock import clock

#: How many wrong tokens one address may send without a wait, and the seconds that it then waits for each further token.
FREE, PAUSE = 10, 5.0

#: How many addresses are distinguished; all others count as one.
MOST_ADDRESSES = 1000


class Tries:
    """The wrong tokens of the last minute."""

    def __init__(self) -> None:
        #: When all wrong tokens of an address are forgotten. Each wrong token adds a pause.
        self._forgotten_at: dict[str, float] = {}

    def wait(self, address: str) -> float:
        """Seconds until a token from this address is accepted for checking; 0: now."""
        forgotten_at = self._forgotten_at.get(self._name(address), 0.0)
        return max(forgotten_at - (FREE - 1) * PAUSE - clock.now(), 0.0)

    def failed(self, address: str) -> None:
        """Note a wrong token from this address."""
        name, now = self._name(address), clock.now()
        self._forgotten_at[name] = max(self._forgotten_at.get(name, now), now) + PAUSE

    def _name(self, address: str) -> str:
        if address not in self._forgotten_at and len(self._forgotten_at) >= MOST_ADDRESSES:
            now = clock.now()
            self._forgotten_at = {name: at for name, at in list(self._forgotten_at.items()) if at > now}
        is_told_apart = address in self._forgotten_at or len(self._forgotten_at) < MOST_ADDRESSES
        return address if is_told_apart else "others"
