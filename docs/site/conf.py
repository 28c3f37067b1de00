"""Sphinx's settings for the documentation site; `make docs` builds it into build/docs.

The sources are the Markdown pages of the repository, where they are: their relative links work on
a code host as well. `contents.yml` has their order.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tierckpt

sys.path.insert(0, str(Path(__file__).parent))

project = "Tierckpt"
release = version = tierckpt.__version__
html_title = f"Tierckpt {release}"

extensions = [
    "myst_parser",
    "sphinx_external_toc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "extension",
]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/*.md", "examples/*/*.md"]
external_toc_path = "docs/site/contents.yml"
myst_heading_anchors = 6  # as code hosts make them from headings
myst_links_external_new_tab = False

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["index"]
html_copy_source = False
html_show_copyright = False

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
default_role = "name"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
