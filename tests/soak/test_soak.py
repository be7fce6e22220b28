"""What a soak considers flat, and its picture."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from tests.soak.__main__ import POINTS, _lately
from tests.soak.picture import picture
from tests.soak.soak import grown

WARM = [{"MB of prefork": min(40.0 + number, 60.0)} for number in range(POINTS)]
STEADY = [100] * POINTS
TWICE = [{"keys of locks": 2000.0 if number < POINTS * 0.7 else 4000.0} for number in range(POINTS)]


def test_growth_during_the_warm_up_is_flat() -> None:
    assert grown(WARM, STEADY) == []


def test_growth_is_reported() -> None:
    leak = [{"MB of prefork": 40.0 + number / 4, "threads of prefork": 7.0} for number in range(POINTS)]
    assert [one.split()[:3] for one in grown(leak, STEADY)] == [["MB", "of", "prefork"]]


def test_peak_is_not_growth() -> None:
    peak = [{"keys of locks": 9000.0 if number == POINTS - 5 else 1000.0} for number in range(POINTS)]
    assert grown(peak, STEADY) == []


def test_lock_server_may_hold_more_where_more_was_sent() -> None:
    assert grown(TWICE, [100 if number < POINTS * 0.7 else 200 for number in range(POINTS)]) == []
    assert grown(TWICE, STEADY) == ["keys of locks grew from 2000.0 to 4000.0"]


def test_messages_of_the_last_minute_are_counted() -> None:
    assert _lately([0, 5, 9, 10], 2) == [0, 5, 9, 5]


def test_picture_is_well_formed_and_has_a_line_for_each_quantity() -> None:
    samples = [{"MB of a": 1.0, "MB of <b>": 2.0, "keys of locks": 0.0}] * 3
    drawn = ET.fromstring(picture(samples, 60.0, "3 tasks"))
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == len(samples[0])
