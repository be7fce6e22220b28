"""When a host counts as cut off from its lock servers."""

from __future__ import annotations

import pytest

from tests.storm.silences import Silences


def silences(*spans: tuple[str, float, float], too_few: int = 1) -> Silences:
    return Silences(spans, too_few=too_few, pause=0.5)


@pytest.mark.parametrize(("way", "is_cut"), [("east/0", True), ("*/0", True), ("west/0", False)])
def test_concerns_one_host_or_all(way: str, is_cut: bool) -> None:
    assert silences((way, 1, 3)).cover("east", 1, 3) is is_cut


def test_lasts_until_the_server_is_heard_again() -> None:
    found = silences(("*/0", 1, 3))
    assert (found.cover("east", 2, 3.5), found.cover("east", 2, 3.6)) == (True, False)


def test_consecutive_silences_count_as_one() -> None:
    found = silences(("*/0", 1, 3), ("east/0", 3.2, 5))
    assert (found.cover("east", 1, 5), found.cover("west", 1, 5)) == (True, False)


def test_needs_enough_silent_servers_at_once() -> None:
    found = silences(("*/0", 1, 4), ("*/1", 2, 5), too_few=2)
    assert [found.touch("east", at, at) for at in (1.5, 3.0, 4.8)] == [False, True, False]


def test_two_faults_of_one_server_count_as_one() -> None:
    assert not silences(("*/0", 1, 4), ("east/0", 2, 5), too_few=2).touch("east", 0, 9)
