"""The reference of a command line, in Markdown, made from its argparse parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

WIDTH = 78
"""Columns of a usage."""


def command_reference(parser: argparse.ArgumentParser) -> str:
    """Describe all commands: a section for each, with its usage and a table of its arguments."""
    return "".join(_sections(parser))


def _sections(parser: argparse.ArgumentParser, summary: str = "") -> Iterator[str]:
    subparsers = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not subparsers:
        yield f"\n## {parser.prog}\n\n{_sentence(summary)}\n"
        yield f"\n{_escaped(parser.description or '')}\n"
        yield f"\n```text\n{_usage(parser)}\n```\n{_table(parser)}"
    for commands in subparsers:
        summaries = {each.dest: each.help or "" for each in commands._choices_actions}
        for name, command in commands.choices.items():
            yield from _sections(command, summaries.get(name, ""))


def _usage(parser: argparse.ArgumentParser) -> str:
    formatter = parser.formatter_class(parser.prog, width=WIDTH)
    groups = parser._mutually_exclusive_groups
    formatter.add_usage(parser.usage, parser._actions, groups, prefix="")
    return formatter.format_help().strip()


def _table(parser: argparse.ArgumentParser) -> str:
    """The arguments that have a help text; empty if there are none."""
    formatter = parser.formatter_class(parser.prog)
    rows = []
    for action in parser._actions:
        if action.help in (None, argparse.SUPPRESS) or isinstance(action, argparse._HelpAction):
            continue
        name = formatter._format_action_invocation(action).replace("|", r"\|")
        rows.append(f"| `{name}` | {_escaped(formatter._expand_help(action))} |\n")
    return "".join(["\n| argument | meaning |\n|---|---|\n", *rows]) if rows else ""


def _sentence(text: str) -> str:
    return _escaped(text[:1].upper() + text[1:].rstrip(".") + ".") if text else ""


def _escaped(text: str) -> str:
    """The text in one line, with Markdown's special characters escaped, except in backticks."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    parts[::2] = [re.sub(r"([\\*_\[\]<>|#])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
