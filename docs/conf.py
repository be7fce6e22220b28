"""The documentation as a site: `make docs` builds it into `docs/_build/html`, offline and without a warning.

The pages are plain Markdown with plain links, which GitHub shows as they are.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generate import every_command

project = "celery-singleton-lock"
copyright = "the celery-singleton-lock authors"
version = release = version_of("celery-singleton-lock")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
# A missing page is not an error in the table of contents.
suppress_warnings = ["toc.empty_glob"]

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]
# Prompts (`$ ` and `>>> `) and output are not copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# In docstrings `x` is code.
default_role = "code"
autodoc_default_options = {"member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"celery-singleton-lock {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/celery-singleton-lock/celery-singleton-lock/",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_show_sphinx = False
html_last_updated_fmt = ""
pygments_style = "friendly"
pygments_dark_style = "native"

#: Pages beside `docs` that the site shows as well: on GitHub links lead to the file, on the site to the page.
_BESIDE = {
    "CHANGELOG.md": "site/changelog.md",
    "benchmarks/results/README.md": "site/benchmarks.md",
    "benchmarks/results/packages.md": "site/packages.md",
    "benchmarks/results/schemes.md": "site/schemes.md",
    "tests/celery_suite/README.md": "site/celery-suite.md",
    "examples/README.md": "site/examples.md",
    "examples/django": "site/examples.md",
    "examples/testing": "site/examples.md",
    "README.md": "index.md",
}


def _lead_to_pages(app: Any, docname: str, source: list[str]) -> None:
    depth = docname.count("/")
    for file, page in _BESIDE.items():
        # The site's pages do not have all headings of the files.
        link = re.compile(rf"\]\({re.escape('../' * (depth + 1) + file)}(#[^)]*)?\)")
        source[0] = link.sub(f"]({'../' * depth}{page})", source[0])


def _with_commands(app: Any, docname: str, source: list[str]) -> None:
    if docname == "reference/commands":
        source[0] = source[0].replace("<!-- made from the code -->", every_command())


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _lead_to_pages)
    app.connect("source-read", _with_commands)
