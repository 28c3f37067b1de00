"""Sphinx's settings for the documentation site, which `make docs` builds.

The sources are the Markdown pages where they are in the repository, so that their relative links
work on a code host as well. `contents.yml` has their order, `extension.py` what Sphinx lacks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tierckpt

sys.path.insert(0, str(Path(__file__).parent))

project = "Tierckpt"
release = version = tierckpt.__version__
extensions = [
    "myst_parser",
    "sphinx_external_toc",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "extension",
]

root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/**.md", "examples/**.md"]
exclude_patterns = [".venv", "build"]
external_toc_path = "docs/site/contents.yml"
myst_heading_anchors = 6  # the anchors of code hosts

default_role = "name"
smartquotes = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"Tierckpt {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["index"]  # index.html, which leads to README.html
html_copy_source = False
html_show_copyright = False
toc_object_entries_show_parents = "hide"
