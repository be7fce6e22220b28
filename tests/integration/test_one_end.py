"""A message has one end, which never changes, is reported once, and for which nobody waits forever."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import GroupResult

from tests.integration.conftest import Shop, until

#: Celery's states that do not change.
READY = {"SUCCESS", "FAILURE", "REVOKED"}


def final(shop: Shop, result: Any) -> list[str]:
    """The states of a result and its parents, once they are final."""
    found: list[str] = []
    while result is not None:
        for each in result.results if isinstance(result, GroupResult) else [result]:
            until(lambda each=each: shop.state_of(each) in READY)
            found.append(shop.state_of(each))
        result = result.parent
    return found


class TestIdThatIsUsedAgain:
    """It is used by a program without the code of the tasks: its messages contain nothing random."""

    @pytest.fixture(autouse=True)
    def _workers(self, shop: Shop) -> None:
        shop.start("one")

    def test_rest_of_the_chain_gets_a_state(self, shop: Shop) -> None:
        step = shop.sign("exclusive", "report", immutable=True)
        step.freeze()
        for _ in range(2):
            result = chain(step, shop.sign("echo"), app=shop.app).apply_async()
            assert set(final(shop, result)) <= READY

    def test_chord_body_gets_a_state(self, shop: Shop) -> None:
        step = shop.sign("exclusive", "report", immutable=True)
        step.freeze()
        for _ in range(2):
            result = chord(group([step, shop.sign("echo", 1)], app=shop.app), shop.sign("echo"), app=shop.app)()
            assert set(final(shop, result)) <= READY
