"""The model of Redis answers, and holds, what a real server does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from celery_singleton_lock.stores.redis.script import Command
from celery_singleton_lock.testing import RedisServer
from tests.simulation.redis.comparison import Pair, RealSession
from tests.simulation.redis.questions import SEQUENCES

Sequence_ = Sequence[tuple[int, Sequence[Command]]]

SOME, MANY = 250, int(os.environ.get("MODEL_SEQUENCES", "5000"))
_SETTINGS: dict[str, Any] = {"suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@pytest.fixture
def control(redis_server: RedisServer) -> Iterator[RealSession]:
    session = RealSession(redis_server)
    yield session
    session.close()


def compare(server: RedisServer, control: RealSession, sequence: Sequence_) -> None:
    info = control.ask("INFO", "server").decode()
    version = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)["redis_version"]
    pair = Pair(server, control, version=version, clients=4)
    try:
        for client, commands in sequence:
            pair.step(client, commands)
    finally:
        pair.close()


@given(sequence=SEQUENCES)
@settings(max_examples=SOME, **_SETTINGS)
def test_some_sequences(redis_server: RedisServer, control: RealSession, sequence: Sequence_) -> None:
    compare(redis_server, control, sequence)


@pytest.mark.slow
@given(sequence=SEQUENCES)
@settings(max_examples=MANY, **_SETTINGS)
def test_many_sequences(redis_server: RedisServer, control: RealSession, sequence: Sequence_) -> None:
    compare(redis_server, control, sequence)
