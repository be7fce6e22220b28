"""Runs the demo and keeps its terminal as docs/pictures/demo.svg: `python -m docs.picture`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from examples.demo import __main__ as demo

if __name__ == "__main__":
    demo.console = Console(record=True, width=102, file=io.StringIO(), force_terminal=True)
    status = demo.main()
    # Leave out the font, which would be fetched from another site.
    svg_format = re.sub(r"@font-face \{\{.*?\n    \}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    picture = demo.console.export_svg(title="make demo", code_format=svg_format)
    (Path(__file__).parent / "pictures" / "demo.svg").write_text(picture + "\n")
    sys.exit(status)
