"""Check that a tag, `pyproject.toml` and the changelog name the same version: `python .github/version.py v1.2.3`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, project: str, changelog: str) -> list[str]:
    """What is wrong with a release of this tag; nothing if all is well.

    Args:
        tag: such as "v1.2.3".
        project: the text of `pyproject.toml`.
        changelog: the text of `CHANGELOG.md`.
    """
    found = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    version = found[1] if found else None
    wrong = []
    if tag != f"v{version}":
        wrong.append(f"the tag is {tag}, and pyproject.toml has version {version}: tag v{version}, or change that")
    if not re.search(rf"^## {re.escape(tag.removeprefix('v'))} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        wrong.append(f"CHANGELOG.md has no section '## {tag.removeprefix('v')} - YYYY-MM-DD': name and date it so")
    return wrong


if __name__ == "__main__":
    texts = ((ROOT / name).read_text() for name in ("pyproject.toml", "CHANGELOG.md"))
    if wrong := problems(sys.argv[1], *texts):
        sys.exit("\n".join(wrong))
