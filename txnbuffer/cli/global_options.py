"""Options of `txnbuf` itself, which are accepted before and after the name of a command"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from txnbuffer.config import LoadedConfig

CONFIG, PROFILE = "TXNBUFFER_CONFIG", "TXNBUFFER_PROFILE"
FILE = "txnbuffer.toml"


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Store what is given where all contexts of a command line find it; a later one takes precedence."""
    if value:
        ctx.meta[f"{__name__}.{param.name}"] = value


def _given(ctx: click.Context, name: str) -> Any:
    return ctx.meta.get(f"{__name__}.{name}")


def _options(*, hidden: bool) -> list[click.Option]:
    settings: dict[str, Any] = {"expose_value": False, "callback": _remember, "hidden": hidden}
    return [
        click.Option(["-v", "--verbose"], is_flag=True, help="Also log what helps to find a fault.", **settings),
        click.Option(["-q", "--quiet"], is_flag=True, help="Print results and errors only.", **settings),
        click.Option(["--log-format"], type=click.Choice(["text", "json"]), help="Form of log lines on stderr: "
                     "json by default for a service whose stderr is no terminal, else text.", **settings),
        click.Option(["--profile"], metavar="NAME", help="Profile of the configuration file. Environment: "
                     f"{PROFILE}.", **settings),
    ]  # fmt: skip


SHOWN, HIDDEN = _options(hidden=False), _options(hidden=True)
"""The options as `txnbuf --help` shows them, and as commands accept them."""
NAMES = ", ".join(option.opts[0] for option in SHOWN)


def logging_as_given(ctx: click.Context, *, logs_events: bool) -> AbstractContextManager[None]:
    """Log lines as the options say; by default those of a command that logs events are JSON without a terminal."""
    from txnbuffer.cli.logs import log_lines

    verbose, quiet, form = (_given(ctx, name) for name in ("verbose", "quiet", "log_format"))
    if verbose and quiet:
        raise click.UsageError("-v and -q exclude each other: give one of them", ctx)
    terminal = sys.stderr is not None and sys.stderr.isatty()
    json_lines = form == "json" or (form is None and logs_events and not terminal)
    return log_lines(verbose=bool(verbose), quiet=bool(quiet), json_lines=json_lines)


def is_quiet(ctx: click.Context) -> bool:
    """Whether the command prints results and errors only."""
    return bool(_given(ctx, "quiet"))


def load_given(
    ctx: click.Context, path: str | None, flags: Iterable[str] = (), profile: str | None = None
) -> LoadedConfig:
    """The configuration of a command that was given the file and settings. Raises InvalidConfiguration."""
    from txnbuffer.config import load

    profile = profile or _given(ctx, "profile")
    return load(config_file(ctx, path, profile), os.environ, flags, profile=profile)


def file_and_profile(ctx: click.Context, path: str | None) -> dict[str, str]:
    """The configuration file of a command and the profile that it was given, as options of a data source of Spark."""
    profile = _given(ctx, "profile")
    found = {"config": config_file(ctx, path, profile), "profile": profile}
    return {name: text for name, text in found.items() if text}


def config_file(ctx: click.Context, path: str | None, profile: str | None = None) -> str | None:
    """The configuration file of a command: the one that is given, else the user's, if it exists.

    A service uses that of the user only if a profile is chosen.
    """
    if path := path or os.environ.get(CONFIG):
        return path
    if profile or os.environ.get(PROFILE):
        return user_file()
    of_user = not getattr(ctx.command, "logs_events", False) and os.path.exists(user_file())
    return user_file() if of_user else None


def user_file() -> str:
    """The path of the user's configuration file."""
    return os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), FILE)
