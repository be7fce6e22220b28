from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.compare import BASE, THIS, NoHistory
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


def test_missing_history_is_reported_and_not_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(sys, "argv", ["compare", "--quick"])
    compare.main()
    assert capsys.readouterr().out.startswith("nothing to compare with")


class TestGit:
    @pytest.fixture
    def git(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        """Runs git in a repository with one commit on main."""
        monkeypatch.setattr(compare, "ROOT", tmp_path)
        for who in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{who}_NAME", "somebody")
            monkeypatch.setenv(f"GIT_{who}_EMAIL", "somebody@example.org")
        compare._git("init", "--quiet", "--initial-branch=main")
        self.change(tmp_path, "1")
        return tmp_path

    def change(self, tree: Path, text: str, *, commit: bool = True) -> str:
        package = tree / compare.PACKAGE
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(text)
        if commit:
            compare._git("add", "-A")
            compare._git("commit", "--quiet", "--message", text)
        return compare._git("rev-parse", "HEAD")

    def test_base_on_main_is_the_commit_before(self, git: Path) -> None:
        first = compare._git("rev-parse", "HEAD")
        self.change(git, "2")
        assert compare._commit("") == first

    def test_named_base_is_used(self, git: Path) -> None:
        first = compare._git("rev-parse", "HEAD")
        self.change(git, "2")
        self.change(git, "3")
        assert compare._commit("HEAD~2") == first
        with pytest.raises(NoHistory):
            compare._commit("nowhere")
