"""Chains, groups, chords and callbacks whose exclusive tasks meet: every result reaches a final state."""

from __future__ import annotations

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult, GroupResult

from tests.integration.conftest import LONG, Shop, until
from tests.patience import LIMIT
from tests.recording import overlaps

READY = {"SUCCESS", "FAILURE", "REVOKED"}


@pytest.fixture(autouse=True)
def _workers(shop: Shop) -> None:
    shop.start("one", "two")


def policy(name: str) -> dict[str, object]:
    return {"headers": {"singleton_lock": {"on_conflict": name}}}


def final_states(shop: Shop, result: AsyncResult) -> set[str]:
    """The states of a result and its parents, once they are final."""
    found = set()
    while result is not None:
        members = result.results if isinstance(result, GroupResult) else [AsyncResult(result.id, app=shop.app)]
        for member in members:
            until(lambda member=member: member.ready())
            found.add(member.state)
        result = result.parent
    return found


@pytest.mark.parametrize("name", ["skip", "raise", "reject", "retry"])
def test_chord_with_duplicates_in_its_header(shop: Shop, name: str) -> None:
    """Some of them meet each other; the chord ends in any case, and its body runs at most once."""
    header = group([shop.sign("exclusive", "report", 0.5, **policy(name)) for _ in range(4)], app=shop.app)
    result = chord(header, shop.sign("mark"), app=shop.app)()
    assert final_states(shop, result) <= READY
    runs = shop.record.runs("report")
    assert overlaps(runs) == []
    if len(runs) == 4:
        assert result.get(timeout=LIMIT) == "marked"
    assert len(shop.record.runs("mark")) == (len(runs) == 4)
    assert name != "retry" or len(runs) == 4


def test_chain_of_the_same_call(shop: Shop) -> None:
    """Each step finds the lock free: the lock is freed before the next step is sent."""
    for _ in range(10):
        step = shop.sign("exclusive", "report", 0.0, immutable=True)
        assert chain(step, step, step, app=shop.app)().get(timeout=LIMIT) == "report"
    assert len(shop.record.runs("report")) == 30


def test_link_error_of_a_refused_copy_is_sent(shop: Shop) -> None:
    holder = shop.send("exclusive", "report", LONG)
    shop.record.wait_for(starts=1)
    refused = shop.send("exclusive", "report", link_error=shop.sign("mark"), singleton_lock={"on_conflict": "raise"})
    assert isinstance(refused.get(timeout=LIMIT, propagate=False), Exception)
    shop.record.wait_for(starts=1, job="mark")
    shop.record.let_end("report")
    assert holder.get(timeout=LIMIT) == "report"
