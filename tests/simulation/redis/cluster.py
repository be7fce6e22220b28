"""What a cluster node believes about the other nodes, given from outside."""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.simulation.redis.replies import CommandError

SLOTS = 16384
Address = tuple[str, int]


def slot_of(key: bytes) -> int:
    _, opened, rest = key.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return binascii.crc_hqx(tag if opened and closed and tag else key, 0) % SLOTS


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """Which node has which slots.

    Attributes:
        myself: the node that believes this.
        ranges: first slot, last slot, and the nodes that have them: the master, then its replicas.
        migrating: slots of this node that are about to move to another node, to which it redirects clients for keys
            that it does not have.
        importing: slots that are about to move here, and are served to clients that say ASKING.
    """

    myself: Address
    ranges: Sequence[tuple[int, int, Sequence[Address]]]
    migrating: Mapping[int, Address] = field(default_factory=dict)
    importing: Mapping[int, Address] = field(default_factory=dict)

    def owner(self, slot: int) -> Address | None:
        return next((nodes[0] for first, last, nodes in self.ranges if first <= slot <= last), None)

    def redirection(
        self, keys: Sequence[bytes], held: int, *, asking: bool, is_seven: bool = True
    ) -> CommandError | None:
        """The redirection of a client that asks for these keys here; None if it is at the right node.

        Args:
            keys: that it names.
            held: how many of them exist here.
            asking: whether it has said ASKING.
            is_seven: whether the server's version is 7 or later.
        """
        if not keys:
            return None
        slots = {slot_of(key) for key in keys}
        if len(slots) > 1:
            return CommandError("CROSSSLOT Keys in request don't hash to the same slot")
        slot = slots.pop()
        owner = self.owner(slot)
        if owner is None:
            return CommandError("CLUSTERDOWN Hash slot not served")
        if owner == self.myself and slot in self.migrating and held < len(keys):
            if held and is_seven:
                return CommandError("TRYAGAIN Multiple keys request during rehashing of slot")
            return CommandError("ASK {} {}:{}".format(slot, *self.migrating[slot]))
        if owner != self.myself and slot in self.importing and asking:
            if held < len(keys) and len(keys) > 1:
                return CommandError("TRYAGAIN Multiple keys request during rehashing of slot")
            return None
        return None if owner == self.myself else CommandError("MOVED {} {}:{}".format(slot, *owner))
