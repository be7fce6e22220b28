"""The model of Redis answers, and holds, what a real server does; and the stores keep their promises on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.redis.script import Command
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.testing import RedisServer, StoreContract
from tests.simulation.redis.comparison import Pair, RealSession
from tests.simulation.redis.questions import SEQUENCES
from tests.simulation.redis.served import ServedModel

Steps = Sequence[tuple[int, Sequence[Command]]]

SOME, MANY = 250, int(os.environ.get("MODEL_SEQUENCES", "5000"))
_SETTINGS: dict[str, Any] = {"suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@pytest.fixture
def control(redis_server: RedisServer) -> Iterator[RealSession]:
    session = RealSession(redis_server)
    yield session
    session.close()


def compare(server: RedisServer, control: RealSession, steps: Steps, resp: int) -> None:
    pair = Pair(server, control, clients=4, resp=resp)
    try:
        for client, commands in steps:
            pair.step(client, commands)
    finally:
        pair.close()


@given(steps=SEQUENCES, resp=st.sampled_from([2, 2, 3]))
@settings(max_examples=SOME, **_SETTINGS)
def test_some_sequences(redis_server: RedisServer, control: RealSession, steps: Steps, resp: int) -> None:
    compare(redis_server, control, steps, resp)


@pytest.mark.slow
@given(steps=SEQUENCES, resp=st.sampled_from([2, 2, 3]))
@settings(max_examples=MANY, **_SETTINGS)
def test_many_sequences(redis_server: RedisServer, control: RealSession, steps: Steps, resp: int) -> None:
    compare(redis_server, control, steps, resp)


class OnTheModel(StoreContract):
    databases = 1

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with ServedModel() as served:
            urls = ";".join(map(served.url_of, range(self.databases)))
            store = open_url(urls, {"restart_delay": False})
            yield store
            store.close()


class TestRedisOnTheModel(OnTheModel):
    pass


class TestRedlockOnTheModel(OnTheModel):
    databases = 5
    frees_beyond_the_limit = False
