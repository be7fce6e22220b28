"""The model of Redis has the same answers and data as a real server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from celery_singleton_lock.stores.redis.script import Command
from tests.redis_server import RedisServer
from tests.servers import Cluster, until
from tests.simulation.redis import ClusterMap, RedisModel, slot_of
from tests.simulation.redis.comparison import ModelSession, Pair, RealSession, alike, version_of
from tests.simulation.redis.questions import HAND_OVERS, SEQUENCES

Steps = Sequence[tuple[int, Sequence[Command]]]

SOME, MANY = 60, int(os.environ.get("MODEL_SEQUENCES", "2000"))


@pytest.fixture
def control(redis_server: RedisServer) -> Iterator[RealSession]:
    session = RealSession(redis_server)
    yield session
    session.close()


def compare(server: RedisServer, control: RealSession, steps: Steps) -> None:
    pair = Pair(server, control, clients=4)
    try:
        for client, commands in steps:
            pair.step(client, commands)
    finally:
        pair.close()


@pytest.mark.parametrize("many", [SOME, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [SEQUENCES, HAND_OVERS], ids=["any", "hand-overs"])
def test_sequences(redis_server: RedisServer, control: RealSession, kind: SearchStrategy[Steps], many: int) -> None:
    @given(steps=kind)
    @settings(max_examples=many if kind is SEQUENCES else many // 3, suppress_health_check=[HealthCheck.too_slow])
    def agree(steps: Steps) -> None:
        compare(redis_server, control, steps)

    agree()


@pytest.mark.parametrize("size", [100, 20_000])
def test_a_long_pipeline_is_carried_out_in_parts(redis_server: RedisServer, control: RealSession, size: int) -> None:
    """A client that it has woken goes on before the rest of the pipeline is read."""
    compare(
        redis_server,
        control,
        [
            (1, [("BLPOP", "list{1}", 0), ("SET", "k{1}", "woken")]),
            (0, [("RPUSH", "list{1}", 1), ("SET", "other{1}", b"x" * size), ("GET", "k{1}")]),
        ],
    )


def test_commands_behind_a_woken_pop_run_at_the_end_of_the_turn(
    redis_server: RedisServer, control: RealSession
) -> None:
    """They run even after commands that other clients have sent meanwhile: both servers read from two at once."""
    until(lambda: is_woken_within_a_turn(redis_server, control), "the commands were sent within one turn")


def is_woken_within_a_turn(server: RedisServer, control: RealSession) -> bool:
    """Compare both servers; False if the real one may have read the commands in two turns, on a busy machine."""
    control.ask("FLUSHALL")
    real = [RealSession(server) for _ in range(3)]
    model = RedisModel(lambda: 0.0)
    modelled = [ModelSession(model, number) for number in range(3)]
    sent: list[list[Command]] = [[("BLPOP", "k", 0), ("GET", "x")], [("RPUSH", "k", 1)], [("SET", "x", 2)]]
    for session in (real[0], modelled[0]):
        session.send(sent[0])
    until(lambda: control.ask("INFO", "clients").count(b"blocked_clients:1") == 1, "the pop waits")
    used = processor_time(server)
    control.send([("EVAL", "for _ = 1, 40000000 do end", 0)])
    until(lambda: processor_time(server) > used, "the turn has begun")  # Else the first could come in the turn before.
    for client in (1, 2):
        real[client].send(sent[client])
    with model.turn():
        for client in (1, 2):
            modelled[client].send(sent[client])
    in_time = control.more() is None
    if in_time:
        control.read()
    expected = [[[b"k", b"1"], b"2"], [1], [b"OK"]]
    assert [each.answers() for each in modelled] == expected
    found = [[each.read() for _ in answers] for each, answers in zip(real, expected, strict=True)]
    assert found == expected or not in_time
    for each in real:
        each.close()
    return in_time


def processor_time(server: RedisServer) -> int:
    """In ticks of the kernel."""
    _, _, fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")
    return sum(map(int, fields.split()[11:13]))


@pytest.mark.slow
def test_a_node_of_a_cluster_redirects_as_a_real_one_does() -> None:
    with Cluster(masters=2, replicas=0) as cluster:
        key = "a{1}"
        here = cluster.master_of(key)
        (there,) = (server for server in cluster.servers if server is not here)
        with RealCluster(here, there, slot_of(key.encode())) as pair:
            pair.compare()
            pair.migrate()
            pair.compare()


class RealCluster:
    """Two nodes, one of which has the slot of a key or is about to give it away; and a model of each."""

    def __init__(self, here: RedisServer, there: RedisServer, slot: int) -> None:
        self._slot = slot
        self._servers = here, there
        self._addresses = [("127.0.0.1", server.port) for server in self._servers]
        self._real = [RealSession(server) for server in self._servers]
        self._models = [RedisModel(lambda: 0.0, version=version_of(real)) for real in self._real]
        self._modelled = [ModelSession(model, 0) for model in self._models]
        self._ranges = [
            (first, last, [(node[0].decode(), node[1]) for node in nodes])
            for first, last, *nodes in self._real[0].ask("CLUSTER", "SLOTS")
        ]
        for model, address in zip(self._models, self._addresses, strict=True):
            model.cluster = ClusterMap(address, self._ranges)

    def __enter__(self) -> RealCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for real in self._real:
            real.close()

    def migrate(self) -> None:
        here, there = self._addresses
        names = [real.ask("CLUSTER", "MYID") for real in self._real]
        self._real[1].ask("CLUSTER", "SETSLOT", self._slot, "IMPORTING", names[0])
        self._real[0].ask("CLUSTER", "SETSLOT", self._slot, "MIGRATING", names[1])
        self._models[0].cluster = ClusterMap(here, self._ranges, migrating={self._slot: there})
        self._models[1].cluster = ClusterMap(there, self._ranges, importing={self._slot: here})

    def compare(self) -> None:
        commands: list[Command] = [
            ("SET", "a{1}", 1),
            ("GET", "b{1}"),
            ("EXISTS", "a{1}", "b{1}"),
            ("EXISTS", "b{1}", "c{1}"),
            ("EXISTS", "a{1}", "a{2}"),
            ("EVAL", "return redis.call('GET', KEYS[1])", 1, "a{1}"),
            ("EVAL", "return redis.call('GET', KEYS[1])", 2, "b{1}", "a{1}"),
            ("EVAL", "return redis.call('GET', KEYS[1])", 2, "b{1}", "b{2}"),
            ("EVAL", "return redis.pcall('GET', 'a{1}')", 0),
            ("EVAL", "return redis.call('GET', 'b{1}')", 1, "a{1}"),
            ("ASKING",),
            ("GET", "b{1}"),
            ("ASKING",),
            ("SET", "b{1}", 1),
            ("GET", "b{1}"),
            ("ASKING",),
            ("EXISTS", "b{1}", "c{1}"),
        ]
        for real, modelled in zip(self._real, self._modelled, strict=True):
            for command in commands:
                modelled.send([command])
                (expected,) = modelled.answers()
                assert alike(real.ask(*command), expected), command
