"""`txnbuf man`, and the descriptions of all commands, from which the reference page of the documentation is made too"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import click

from txnbuffer import __version__
from txnbuffer.cli.commands import AddressCommand

CODE = re.compile("`([^`]*)`")
EXIT_CODES = "Exit codes: "
"""How the paragraph about exit codes begins."""
ENVIRONMENT = {
    "TXNBUFFER_ADDRESS": "ADDRESS of commands that are given none.",
    "TXNBUFFER_CONFIG": "Configuration file of all commands.",
    "TXNBUFFER_PROFILE": "Profile of the configuration file.",
    "TXNBUFFER_TLS_CA": "CA certificate of the service (PEM); also TXNBUFFER_TLS_CERT and TXNBUFFER_TLS_KEY.",
    "TXNBUFFER_TOKEN": "Token for the service; TXNBUFFER_TOKEN_FILE names a file with it.",
    "TXNBUFFER_SECTION_KEY": "Setting KEY of SECTION of the configuration; txnbuf config show lists them.",
}


@dataclass(frozen=True, slots=True)
class CommandPage:
    """What the help of a command says: its usage, its paragraphs, and its options with their descriptions."""

    name: str
    usage: str
    paragraphs: list[str]
    options: list[tuple[str, str]]


def described(group: click.Group, names: Iterable[str], parent: click.Context) -> Iterator[CommandPage]:
    """Commands of a group; those of a subgroup follow it."""
    for name in names:
        command = group.get_command(parent, name)
        if command is None:
            continue
        context = click.Context(command, info_name=name, parent=parent)
        yield page_of(command, context)
        if isinstance(command, click.Group):
            yield from described(command, command.list_commands(context), context)


def page_of(command: click.Command, context: click.Context) -> CommandPage:
    """The description of one command."""
    usage = " ".join((context.command_path, *command.collect_usage_pieces(context)))
    paragraphs = [" ".join(text.split()) for text in inspect.cleandoc(command.help or "").split("\n\n")]
    shown = [one for one in command.get_params(context) if isinstance(one, click.Option) and one.name != "help"]
    records = filter(None, (one.get_help_record(context) for one in shown))
    options = [(forms, " ".join(text.split())) for forms, text in records]
    return CommandPage(context.command_path, usage, paragraphs, options)


def man_page(app: click.Group, sections: dict[str, list[str]]) -> str:
    """The manual page of a command in the language of `man`. `sections`: the names of its commands by heading."""
    context = click.Context(app, info_name="txnbuf")
    top = page_of(app, context)
    summary, *about = top.paragraphs
    lines = [
        f'.TH TXNBUF 1 "" "txnbuffer {__version__}" "User Commands"',
        *(".SH NAME", rf"txnbuf \- {_roff(summary.rstrip('.'))}"),
        *(".SH SYNOPSIS", f".B {_roff(top.usage)}"),
        ".SH DESCRIPTION",
        *_paragraphs([text for text in about if not text.startswith(EXIT_CODES)]),
        *(".SH OPTIONS", *_options(top.options)),
    ]
    for heading, names in sections.items():
        lines.append(f".SH {_roff(heading.upper())}")
        for page in described(app, names, context):
            lines += [f'.SS "{_roff(page.usage)}"', *_paragraphs(page.paragraphs), *_options(page.options)]
    lines += [".SH ENVIRONMENT", *_options(ENVIRONMENT.items())]
    lines += [".SH FILES", *_options([("~/.config/txnbuffer.toml", "Configuration of commands, with profiles.")])]
    codes = next(text for text in about if text.startswith(EXIT_CODES)).removeprefix(EXIT_CODES).rstrip(".")
    lines += [".SH EXIT STATUS", *_options(code.split(" ", 1) for code in codes.split("; "))]
    return "\n".join(lines) + "\n"


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (".PP", CODE.sub(r"\\fB\1\\fP", _roff(text)))


def _options(records: Iterable[Iterable[str]]) -> Iterator[str]:
    for forms, text in records:
        yield from (".TP", rf"\fB{_roff(forms)}\fP", _roff(text.replace("`", "")))


def _roff(text: str) -> str:
    """A text that has no meaning of its own in a manual page."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace('"', r"\(dq").replace("…", r"\&...")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


@click.command("man", cls=AddressCommand)
def man_command() -> None:
    """Print the manual page of txnbuf, for man.

    To read it: txnbuf man | man -l -. To install it: txnbuf man > ~/.local/share/man/man1/txnbuf.1
    """
    from txnbuffer.cli.app import app, sections

    click.echo(man_page(app, sections()), nl=False)
