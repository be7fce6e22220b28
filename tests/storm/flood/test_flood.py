"""Thousands of calls of few jobs: exactly as many are sent and run as the scope allows, whichever process dies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from celery_singleton_lock.options.rules import SCOPES, UNTIL_EXPIRED, WHILE_EXECUTING
from tests.storm.flood.flood import Plan, flood
from tests.storm.flood.report import Row, tables

#: Calls of all scopes together, and jobs of each scope; `python -m tests.storm.flood` is larger.
SENDS, JOBS = 1500, 12

#: Seconds for which a lost message keeps others out, and any message under `until_expired`.
QUEUE_TTL, EXPIRED_TTL = 4.0, 4.0

#: Scopes with which one message of each job waits, however long sending takes.
UNTIL_BEGUN_OR_ENDED = {*SCOPES} - {WHILE_EXECUTING, UNTIL_EXPIRED}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("is_deadly", [False, True])
def test_exactly_what_the_scopes_allow(tmp_path: Path, is_deadly: bool) -> None:
    seed = random.SystemRandom().randrange(2**32)
    queue_ttl = QUEUE_TTL if is_deadly else None
    plan = Plan(SCOPES, SENDS, JOBS, is_deadly, expired_ttl=EXPIRED_TTL, queue_ttl=queue_ttl)
    verdict = flood(plan, tmp_path, seed)
    print(f"seed {seed}\n{tables([Row(scope, plan, verdict) for scope in SCOPES])}")
    assert verdict.broken == []
    assert {scope for scope in SCOPES if verdict.counts[scope].duplicates} == {*SCOPES} - {WHILE_EXECUTING}
    assert min(counts.runs for counts in verdict.counts.values()) >= JOBS
    if is_deadly:
        assert any(verdict.counts[SCOPES[0]].killed.values())
    else:
        assert {verdict.counts[scope].queued for scope in UNTIL_BEGUN_OR_ENDED} == {JOBS}
