"""The reference of a command line, in Markdown, made from its argparse parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator


def command_reference(parser: argparse.ArgumentParser) -> str:
    """Describe all commands: a section for each, with its usage and a table of its arguments."""
    return "".join(_sections(parser))


def _sections(parser: argparse.ArgumentParser, summary: str = "") -> Iterator[str]:
    subparsers = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not subparsers:
        yield f"\n## {parser.prog}\n\n"
        yield f"{_sentence(summary)} {_escaped(parser.description or '')}\n"
        yield f"\n```text\n{parser.format_usage().removeprefix('usage: ').strip()}\n```\n\n"
        yield from _table(parser)
    for commands in subparsers:
        summaries = {each.dest: each.help or "" for each in commands._choices_actions}
        for name, command in commands.choices.items():
            yield from _sections(command, summaries.get(name, ""))


def _table(parser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = parser.formatter_class(parser.prog)
    yield "| argument | meaning |\n|---|---|\n"
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        name = formatter._format_action_invocation(action).replace("|", r"\|")
        yield f"| `{name}` | {_escaped(formatter._expand_help(action) if action.help else '')} |\n"


def _sentence(text: str) -> str:
    return _escaped(text[:1].upper() + text[1:].rstrip(".") + "." if text else "")


def _escaped(text: str) -> str:
    """The text with Markdown's special characters escaped, except in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([\\*_\[\]<>|#])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts).replace("\n", " ")
