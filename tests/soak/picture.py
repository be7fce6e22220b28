"""Samples as a picture: a panel for each unit, with a line for each quantity in it. A self-contained SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP, GAP = 760, 120, 70, 40, 46
COLOURS = ("#1b6ca8", "#c2571a", "#3a7d34", "#7a3f9d")


def picture(samples: Sequence[dict[str, float]], seconds: float, title: str) -> str:
    """The samples over that time; each name is "unit of what"."""
    panels: dict[str, list[str]] = {}
    for name in samples[0]:
        panels.setdefault(name.split()[0], []).append(name)
    height = TOP + len(panels) * (HEIGHT + GAP)
    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for number, names in enumerate(panels.values()):
        parts += _panel(samples, names, TOP + number * (HEIGHT + GAP))
    parts.append(f'<text x="{LEFT + WIDTH}" y="{height - 12}" text-anchor="end">{seconds / 60:.0f} min</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + LEFT + 20}" height="{height}"'
    look = 'font-family="sans-serif" font-size="12" fill="#222"><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f"{head} {look}", *parts, "</svg>", ""])


def _panel(samples: Sequence[dict[str, float]], names: Sequence[str], top: int) -> list[str]:
    most = max(max(sample[name] for sample in samples) for name in names) or 1.0
    bottom = top + HEIGHT
    parts = [
        f'<path d="M{LEFT} {top}V{bottom}H{LEFT + WIDTH}" fill="none" stroke="#888"/>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{most:,.0f}</text>',
        f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
    ]
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{LEFT + WIDTH * place / max(len(samples) - 1, 1):.1f},{bottom - HEIGHT * sample[name] / most:.1f}"
            for place, sample in enumerate(samples)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{LEFT + 10 + 190 * number}" y="{bottom + 16}" fill="{colour}">{escape(name)}</text>')
    return parts
