"""A connection of the simulator is like one of TCP: nothing that was sent later arrives earlier."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("greenlet")

from tests.simulation.network import Link, Network, Way
from tests.simulation.scheduler import Simulation

#: Numbers that are sent, each after up to a second.
SENT = 60


class Ends:
    """Both ends of a connection."""

    def __init__(self) -> None:
        self.at_the_server: list[int] = []
        self.at_the_client: list[int] = []

    def receive(self, data: bytes) -> None:
        self.at_the_server.append(int(data))

    def arrive(self, data: bytes) -> None:
        self.at_the_client.append(int(data))

    def close(self) -> None: ...


@pytest.mark.parametrize("seed", range(10))
def test_messages_arrive_in_the_order_in_which_they_were_sent(seed: int) -> None:
    rng, run, link, ends = random.Random(seed), Simulation(seed), Link(delay=(0.1, 1.0)), Ends()
    socket: Any = ends
    way = Way(Network(run), link, socket)
    way.peer = ends

    def cut() -> None:
        link.cut_there, link.cut_back = rng.random() < 0.5, rng.random() < 0.5

    for number in range(SENT):
        when = number + rng.random()
        run.at(when, lambda data=b"%d" % number: way.send(data))  # type: ignore[misc]
        run.at(when, lambda data=b"%d" % number: way.answer(data))  # type: ignore[misc]
        if rng.random() < 0.3:
            run.at(when + rng.random(), rng.choice((cut, cut, link.open)))
        if rng.random() < 0.05:
            run.at(when, lambda: link.holds_back.append(3.0))
    run.at(SENT + 10, link.open)
    run.run(until=SENT + 100)
    assert ends.at_the_server == ends.at_the_client == [*range(SENT)]
