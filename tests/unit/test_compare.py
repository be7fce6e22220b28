from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.compare import BASE, THIS
from benchmarks.measure import Rounds, Spread

EVEN = Spread(1.0, 0.97, 1.04)


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (Spread(1.2, 1.1, 1.3), "slower"),
        (Spread(0.8, 0.7, 0.9), "faster"),
        # Some rounds show the opposite.
        (Spread(1.2, 0.99, 1.3), ""),
        (Spread(0.8, 0.7, 1.01), ""),
        # Two equal versions differ as much.
        (Spread(1.035, 1.01, 1.3), ""),
        (Spread(0.971, 0.9, 0.99), ""),
        (Spread(1.02, 1.01, 1.03), ""),
        (Spread(0.98, 0.975, 0.99), ""),
    ],
)
def test_difference_is_reported_unless_chance_explains_it(ratio: Spread, said: str) -> None:
    assert compare.judged(ratio, EVEN) == said


def test_table_has_medians_ratios_and_noise_in_columns() -> None:
    rounds = Rounds(
        BASE,
        {BASE: [100.0, 200.0, 400.0, 100.0, 400.0], THIS: [150.0, 300.0, 600.0, 150.0, 600.0]},
        [100.0, 200.0, 400.0, 100.0, 400.0],
    )
    head, line, even = compare.table({"a lock, µs": rounds, "import": Rounds(BASE, {BASE: [3], THIS: [3]}, [3])}).split(
        "\n"
    )
    assert " ".join(line.split()) == "a lock, µs 200 300 1.50 1.50 – 1.50 1.00 – 1.00 slower"
    assert " ".join(even.split()) == "import 3 3 1.00 1.00 – 1.00 1.00 – 1.00 1 of the 5 rounds needed"
    assert head.index("× base") + len("× base") == line.index(" 1.50") + len(" 1.50")


def probe(**costs: float) -> Any:
    return SimpleNamespace(costs=lambda: costs)


def test_only_common_figures_are_compared() -> None:
    found = compare.compared(probe(a=2.0, b=5.0, gone=1.0), probe(new=1.0, b=5.0, a=3.0), 2)
    assert {name: rounds.ratio(THIS).median for name, rounds in found.items()} == {"a": 1.5, "b": 1.0}
