"""The parts of the documentation site that Sphinx has no setting for.

- Stand-ins for the frameworks, so that the site does not depend on what is installed.
- Docstrings with sections in Google's style, and signatures as a caller needs them.
- Single backticks in docstrings: code, and a link if the reference has the name.
- The page of commands, made from the parsers.
- A search that also finds the words of a name: `redundancy` finds `peer_redundancy`.
- A warning for each public name that no page of the reference has.
"""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType
from typing import Any

from command_reference import command_reference
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import MockFinder, ismock
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.search.en import SearchEnglish
from sphinx.util import inspect, logging
from sphinx.util.docutils import SphinxRole

from tierckpt.settings import SETTINGS

logger = logging.getLogger(__name__)

FRAMEWORKS = ["horovod", "lightning", "pytorch_lightning", "transformers", "accelerate"]
OTHERS = ["mpi4py", "pytest"]
COMMANDS_PAGE = "docs/reference/commands"
PUBLIC = (
    *("tierckpt", "tierckpt.files", "tierckpt.scr", "tierckpt.mpi"),
    *("tierckpt.exporters", "tierckpt.testing"),
    *("tierckpt.accelerate", "tierckpt.lightning", "tierckpt.transformers"),
    *("ddp_ckpt", "horovod_ckpt", "horovod_ckpt.elastic"),
)
"""The modules with names for users: those in `__all__`, or else those without an underscore."""
NAME = re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register all parts."""
    replace_frameworks()
    app.add_config_value("checks_public_names", True, "env", bool)
    app.add_role("name", NameRole())
    app.add_search_language(SearchNames)
    app.connect("autodoc-process-docstring", read_sections)
    app.connect("autodoc-process-signature", improve_signature)
    app.connect("source-read", add_commands)
    app.connect("doctree-read", unlink_folders)
    app.connect("env-check-consistency", find_missing_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def replace_frameworks() -> None:
    """Import stand-ins for the frameworks from now on."""
    sys.meta_path.insert(0, MockFinder([*FRAMEWORKS, *OTHERS]))
    horovod: Any = importlib.import_module("horovod.torch")
    horovod.DistributedOptimizer = lambda optimizer, named_parameters=None: optimizer


def read_sections(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Turn the sections of a docstring into lists. That of an attribute has none, and napoleon by
    itself would take its first words for a type if a colon follows. The settings have a page."""
    if SETTINGS in lines:
        del lines[lines.index(SETTINGS) :]
    if what not in ("attribute", "property", "data"):
        lines[:] = GoogleDocstring(lines, Config(), app, what, name, value, options).lines()


def improve_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, _: str
) -> tuple[str, str] | None:
    """Leave out that of an interface, which nobody calls; show that of `__init__` if `__new__` or a
    stand-in hides it."""
    if what != "class" or signature is None:
        return None
    if getattr(value, "_is_protocol", False):
        return "", ""
    if "__init__" in vars(value) and ("__new__" in vars(value) or "*args" in signature):
        found = inspect.signature(value.__init__, bound_method=True)
        signature = inspect.stringify_signature(
            found, show_return_annotation=False, unqualified_typehints=True
        )
    return signature.replace("<factory>", "..."), ""


class NameRole(SphinxRole):
    """The role of text in single backticks."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Make the nodes: code, perhaps in a reference, which Sphinx drops if it finds no entry."""
        code = nodes.literal(self.rawtext, self.text, classes=["code"])
        name = NAME.fullmatch(self.text)
        if name is None:
            return [code], []
        link = addnodes.pending_xref("", code, refdomain="py", reftype="obj", reftarget=name[1])
        for key in ("py:module", "py:class"):
            link[key] = self.env.ref_context.get(key)
        link["refdoc"] = self.env.current_document.docname
        return [link], []


class SearchNames(SearchEnglish):
    """English, with the words of names that have underscores."""

    def split(self, input: str) -> list[str]:
        """Split into words; a name comes first as a whole."""
        words = super().split(input)
        return [*words, *(part for word in words if "_" in word for part in word.split("_"))]


def add_commands(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the commands to their page."""
    if page == COMMANDS_PAGE:
        from tierckpt.cli.main import whole_parser  # later than the stand-ins

        source[0] += command_reference(whole_parser())


def unlink_folders(app: Sphinx, tree: nodes.document) -> None:
    """Replace links to folders by their text: a code host shows a folder, a site has no page."""
    for link in list(tree.findall(addnodes.pending_xref)):
        beside = app.srcdir / app.env.current_document.docname
        if link.get("reftype") == "myst" and (beside.parent / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def find_missing_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name that has no entry, under any of its names."""
    if not app.config.checks_public_names:
        return
    entries = env.domains.python_domain.objects
    there = {id(found) for entry in entries if (found := _object(entry)) is not None}
    for module in map(importlib.import_module, PUBLIC):
        for name in _names(module):
            value = getattr(module, name)
            if not ismock(value) and id(value) not in there:
                text = "%s.%s is public, and no page in docs/reference has it"
                logger.warning(text, module.__name__, name)


def _names(module: ModuleType) -> list[str]:
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    return [name for name in getattr(module, "__all__", own) if not name.startswith("_")]


def _object(entry: str) -> Any:
    """The object of an entry, or None if it is no module's attribute (a field, a method)."""
    module, _, name = entry.rpartition(".")
    return getattr(sys.modules.get(module), name, None)
