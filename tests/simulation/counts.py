"""How often rules judged, faults struck, excuses held and shapes were drawn; and what a campaign may miss of that.

A rule that judges nothing is blind, whatever its name says. `counts.json` has the counts of an earlier campaign.
"""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent
FILE = FOLDER / "counts.json"

#: So many seeds reach everything; and a count in so many of them is no chance.
ENOUGH, MANY = 10_000, 100


@dataclass
class Counts:
    """By kind and name: how often, and in how many simulations."""

    times: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seeds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Add those of one simulation."""
        for kind, times in counts.items():
            self.times[kind].update(times)
            self.seeds[kind].update(name for name, count in times.items() if count)

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        for kind, names in known().items():
            yield f"{'times':>14} {'seeds':>8}  {kind}"
            for name in sorted(names | set(self.times[kind]), key=lambda name: (-self.times[kind][name], name)):
                yield f"{self.times[kind][name] or 'never':>14} {self.seeds[kind][name]:>8}  {name}"

    def missed(self, seeds: int) -> Iterator[str]:
        """What never was, or has fallen by half, in so many seeds; nothing if these are few."""
        if seeds < ENOUGH:
            return
        kept = json.loads(FILE.read_text()) if FILE.exists() else {}
        share = seeds / kept.pop("seeds", seeds)
        for kind, names in known().items():
            for name in sorted(names):
                now = self.times[kind][name]
                times, of_seeds = map(int, kept.get(kind, {}).get(name, "0 in 0").split(" in "))
                if not now:
                    yield f"{kind}: never: {name}"
                elif of_seeds * share >= MANY and now * 2 <= times * share:
                    yield f"{kind}: fell from {times * share:,.0f} to {now:,}: {name}"

    def keep(self, seeds: int) -> None:
        """Keep them, for later campaigns."""
        of_each = {
            kind: {name: f"{self.times[kind][name]} in {self.seeds[kind][name]}" for name in sorted(names)}
            for kind, names in known().items()
        }
        FILE.write_text(json.dumps({"seeds": seeds, **of_each}, indent=1) + "\n")


def known() -> dict[str, set[str]]:
    """By kind: the names of all."""
    from tests.simulation import clusters, disagreements, faults, lines, rare, sendings, shapes, sharing, trouble
    from tests.simulation.plan import PLANS

    import_module("tests.simulation.simulate")  # It has all checkers, whose excuses are known by then.
    drawn = (
        clusters.a_slot_moves,
        *lines.SHAPES,
        *sendings.SHAPES,
        sendings.takes_its_place,
        *sendings.IN_CANVAS,
        *sharing.OF_JOINED,
        *sharing.OF_NEWEST,
    )
    drawn += tuple(shape for of_kind in (*shapes.BY_KIND.values(), *rare.BY_KIND.values()) for shape in of_kind)
    names = {shape.__name__ for shape in drawn} | {disagreements.named(theme) for theme in disagreements.THEMES}
    names |= PLANS.keys() - {"lines"}  # Each of them has a shape.
    return {"rules": {*_rules()}, "faults": {*faults.BY_KIND}, "excuses": trouble.EXCUSES, "shapes": names}


def _rules() -> Iterator[str]:
    """The rules: with what `must` is called, or from what it chooses."""
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(
                    func=ast.Name("must") | ast.Attribute(attr="must"), args=[_, ast.Constant(str(rule)), *_]
                ):
                    yield rule
                case ast.Assign(targets=[ast.Name("RULES")], value=rules):
                    yield from ast.literal_eval(rules).values()
                case _:
                    pass
