"""Plans that once broke a promise, as files in `found/`: a test carries each out again."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

from tests.simulation.plan import Fault, Message, Plan, Use

FOLDER = Path(__file__).parent / "found"


def write(plan: Plan, file: Path) -> None:
    """Keep a plan."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(asdict(plan), indent=1, default=sorted) + "\n")


def read(file: Path) -> Plan:
    """Read a kept plan; fields that were added later have their defaults."""
    content = json.loads(file.read_text())
    unknown = set(content) - {field.name for field in fields(Plan)}
    if unknown:
        raise ValueError(f"{file.name}: a plan has no {', '.join(sorted(unknown))}")
    content["messages"] = tuple(Message(**message) for message in content["messages"])
    content["faults"] = tuple(Fault(**fault) for fault in content["faults"])
    content["uses"] = tuple(Use(**{**use, "ways": tuple(use["ways"])}) for use in content.get("uses", ()))
    for pairs in ("limits", "entries"):
        content[pairs] = tuple(tuple(pair) for pair in content.get(pairs, ()))
    return Plan(**content)
