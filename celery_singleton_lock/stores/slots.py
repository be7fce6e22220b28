"""The rules for the slots of a key, for stores that can look at all holds of a key at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.stores.base import Held, LockRequest


@dataclass(slots=True)
class Occupant:
    """The holder of a slot.

    Attributes:
        owner, holder: as they acquired it last, or as it is reserved for them.
        fence: the lease's fencing token.
        ends_at: when the lease, or the reservation, ends; by the store's clock.
    """

    owner: str
    holder: Holder
    fence: int
    ends_at: float

    def held(self, now: float, slot: int | None = None, waiters: int = 0) -> Held:
        """What a newcomer finds."""
        return Held(self.holder, self.owner, self.ends_at - now, slot, waiters)


#: The occupants of a key, by their slot; none of them has ended.
Occupants = Mapping[int, Occupant]


def slot_of(owner: str, occupants: Occupants) -> int | None:
    """The slot that this owner has."""
    return next((slot for slot, it in occupants.items() if it.owner == owner), None)


def free_slot(request: LockRequest, occupants: Occupants) -> int | None:
    """The slot that is free for this request, or reserved for its message; None if it has to wait.

    Taking a slot other than the reserved one frees the reserved one.
    """
    reserved = slot_of(request.holder.reserved_as, occupants)
    if any(it.holder.is_copy_of(request.holder) for slot, it in occupants.items() if slot != reserved):
        return None
    if reserved is not None and reserved < request.limit:
        return reserved
    # Every hold counts, whatever limit it was taken under; a reservation beyond this limit moves to within it.
    free = next((slot for slot in range(request.limit) if slot not in occupants), None)
    return free if reserved is not None or len(occupants) < request.limit else None


def in_the_way(request: LockRequest, occupants: Occupants) -> Occupant:
    """What keeps this request from the lock: a copy of its message, or the lease that ends first."""
    others = [it for it in occupants.values() if it.owner != request.holder.reserved_as]
    copies = [it for it in others if it.holder.is_copy_of(request.holder)]
    return min(copies or others, key=lambda it: it.ends_at)


def copy_of(holder: Holder, occupants: Occupants) -> Occupant | None:
    """The holder that carries out the same message, or has a slot reserved for it."""
    for it in occupants.values():
        if it.owner == holder.reserved_as or (it.holder.is_copy_of(holder) and it.holder.attempt == holder.attempt):
            return it
    return None
