"""The content of `docs/reference/commands.md`: each command of `txnbuf` with its options, made from their help"""

from __future__ import annotations

import re

import click

from txnbuffer.cli.app import app, sections
from txnbuffer.cli.manual import CommandPage, described, page_of

COMMANDS = "<!-- Here docs/site_hook.py puts a description of each command. -->"


def commands() -> str:
    """Return the options of `txnbuf` itself, and a section for each of its commands."""
    context = click.Context(app, info_name="txnbuf")
    parts = ["## Options of txnbuf itself", *options(page_of(app, context))]
    for heading, names in sections().items():
        parts.append(f"## {heading}")
        for page in described(app, names, context):
            parts += [
                f"### {page.name}",
                f"~~~ text\n{page.usage}\n~~~",
                *map(escaped, page.paragraphs),
                *options(page),
            ]
    return "\n\n".join(parts)


def options(page: CommandPage) -> list[str]:
    """Return the list of the options of a command."""
    return ["\n".join(f"- `{forms}`: {escaped(text)}" for forms, text in page.options)] if page.options else []


def escaped(text: str) -> str:
    """Return a text in which only what is between backticks has a meaning in Markdown."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\*_<\[\]|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
