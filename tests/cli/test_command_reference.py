"""The help of all commands, and what is made from it: the manual page and the reference page of the documentation."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from types import ModuleType

import click
import pytest
from commands import txnbuf
from source_tree import ROOT

from txnbuffer.cli.app import COMMANDS, SECTIONS, app, sections

WIDTH = 80
REQUESTS = re.compile(r"\.(?:TH|SH|SS|PP|TP|B)\b")


def contexts(group: click.Group = app, parent: click.Context | None = None) -> Iterator[click.Context]:
    """The context of each command."""
    here = parent or click.Context(app, info_name="txnbuf")
    for name in group.list_commands(here):
        command = group.get_command(here, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=here)
        yield context
        if isinstance(command, click.Group):
            yield from contexts(command, context)


ALL = list(contexts())


def shown(context: click.Context) -> list[click.Option]:
    """The options of a command that are not those of `txnbuf` itself."""
    options = [one for one in context.command.get_params(context) if isinstance(one, click.Option)]
    return [one for one in options if not one.hidden and one.name != "help"]


def reference() -> str:
    spec = importlib.util.spec_from_file_location("command_pages", ROOT / "docs" / "command_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text: str = module.commands()
    return text


def test_every_command_has_a_section_of_help() -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(COMMANDS) <= set(listed)
    assert len(ALL) > 50


@pytest.mark.parametrize("context", ALL, ids=lambda context: context.command_path)
def test_help_of_a_command_describes_all_of_it_and_fits_a_terminal(context: click.Context) -> None:
    assert (context.command.help or "").strip()
    assert [one.name for one in shown(context) if not (one.help or "").strip()] == []
    wide = click.Context(context.command, info_name=context.info_name, parent=context.parent, max_content_width=WIDTH)
    assert [line for line in wide.get_help().splitlines() if len(line) > WIDTH] == []


def test_help_of_txnbuf_fits_a_terminal_and_names_every_command() -> None:
    lines = txnbuf("--help").stdout.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    found = {line.split()[0] for line in lines if re.match(r"  [a-z]", line)}
    assert {name for names in sections().values() for name in names} <= found


def test_reference_has_every_command_and_option() -> None:
    parts = dict(re.findall(r"^### (.*)\n((?:(?!^##).*\n?)*)", reference(), re.MULTILINE))
    assert list(parts) == [context.command_path for context in ALL]
    for context in ALL:
        forms = [form for one in shown(context) for form in (*one.opts, *one.secondary_opts)]
        listed = re.findall(r"^- `(.*?)`: .", parts[context.command_path], re.MULTILINE)
        missing = [form for form in forms if not any(form in re.split(r"[ ,/]+", each) for each in listed)]
        assert missing == [], context.command_path


def test_manual_page_has_every_command_and_option_and_only_known_requests() -> None:
    done = txnbuf("man")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(".TH TXNBUF 1 ")
    headings = [line[4:] for line in lines if line.startswith(".SH ")]
    assert headings[:4] == ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS"]
    assert headings[-3:] == ["ENVIRONMENT", "FILES", "EXIT STATUS"]
    assert [line for line in lines if line.startswith((".", "'")) and not REQUESTS.match(line)] == []
    assert [line for line in lines if not line] == []
    plain = done.stdout.replace(r"\-", "-")
    for context in ALL:
        assert f'.SS "{context.command_path} ' in plain.replace('"\n', ' "\n'), context.command_path
        for one in shown(context):
            assert re.search(rf"\\fB.*{re.escape(one.opts[-1])}\b", plain), one.opts
    assert re.search(r"\.TP\n\\fB141\\fP\nthe reader of the output closed it\n$", plain)


def test_manual_page_is_formatted_without_warnings() -> None:
    """The test before this one checks the form of the page on machines without groff."""
    if groff := shutil.which("groff"):
        command = [groff, "-man", "-ww", "-Tutf8", "-k"]
        done = subprocess.run(command, input=txnbuf("man").stdout, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        assert "txnbuf cursors add" in re.sub(r"\x1b\[\d*m|.\x08", "", done.stdout)
