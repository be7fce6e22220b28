"""What `make bench-compare` measures, in a process with its own server."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compare

pytestmark = pytest.mark.slow


def test_this_tree_yields_all_figures() -> None:
    with compare._probe(compare.ROOT) as probe:
        assert probe.failed == {}
        costs = probe.costs()
    assert len(costs) == 4 * 3 + 2
    assert all(cost > 0 for cost in costs.values())
    assert costs["Lock, server's commands"] == int(costs["Lock, server's commands"])


def test_it_measures_the_package_that_it_is_given(tmp_path: Path) -> None:
    package = tmp_path / compare.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("class SingletonTask: ...")
    with compare._probe(tmp_path) as probe:
        assert probe.failed.keys() == {
            "Lock",
            "as a task locks",
            "a task in Celery's tracer",
            "beat, each due entry",
        }
        assert probe.costs().keys() == {"import, ms", "import, CPU ms"}
