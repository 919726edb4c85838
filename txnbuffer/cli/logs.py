"""Log lines of commands on stderr: of the service, of libraries, and messages for the person at the terminal

    2026-07-01T12:00:00.123Z info serving address=txnbuf://127.0.0.1:7711 port=7711     --log-format text
    {"event": "serving", "address": "txnbuf://127.0.0.1:7711", "port": 7711, "level": "info", "timestamp": "2026-…Z"}

The second form is that of `--log-format json`. `log_lines` configures logging while a command runs, and nothing else
does. What libraries log is the event `library`, and a message the event `message`; as text, a message is printed as it
is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, TextIO

from txnbuffer.cli.output import MESSAGES, printable

EVENTS = logging.getLogger("txnbuffer.events")
OURS = ("broker_io", "snapshots", "txnbuffer")
"""The packages whose debug lines `-v` shows; those of libraries may have secrets in them."""
TEXT, JSON = "text", "json"

LEVELS = {
    **dict.fromkeys(("access file not used", "damage", "failed", "left", "problem", "topic stopped"), logging.ERROR),
    **dict.fromkeys(("denied", "insecure", "repaired"), logging.WARNING),
}
"""The levels of the events of a service that are not `info`."""


def log_event(event: str, **facts: Any) -> None:
    """Log an event of the service."""
    EVENTS.log(LEVELS.get(event, logging.INFO), event, extra={"facts": facts})


@contextlib.contextmanager
def log_lines(*, verbose: bool = False, quiet: bool = False, json_lines: bool = False) -> Iterator[None]:
    """Log to stderr in a block; `quiet` logs errors only."""
    normal = logging.ERROR if quiet else logging.INFO
    levels = {
        "": logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING,
        EVENTS.name: normal,
        MESSAGES.name: normal,
        **dict.fromkeys(OURS if verbose else (), logging.DEBUG),
    }
    loggers = {name: logging.getLogger(name) for name in levels}
    before = {name: logger.level for name, logger in loggers.items()}
    root, handler = logging.getLogger(), _Stderr()
    handler.setFormatter(_JsonLine() if json_lines else _TextLine())
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        for name, level in levels.items():
            loggers[name].setLevel(level)
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        for name, level in before.items():
            loggers[name].setLevel(level)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the stderr of the moment, which a progress bar replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # a variable of the base class
        return sys.stderr


class _Line(logging.Formatter):
    def facts(self, record: logging.LogRecord) -> dict[str, Any]:
        """The event of a record, and its fields."""
        if record.name == EVENTS.name:
            return {"event": record.msg, **record.__dict__["facts"]}
        event = "message" if record.name == MESSAGES.name else "library"
        return {"event": event, "logger": record.name, "message": super().format(record)}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _JsonLine(_Line):
    def format(self, record: logging.LogRecord) -> str:
        more = {"level": record.levelname.lower(), "timestamp": _time(record)}
        return json.dumps(self.facts(record) | more, default=repr)


class _TextLine(_Line):
    def format(self, record: logging.LogRecord) -> str:
        if record.name == MESSAGES.name:
            return record.getMessage()
        facts = self.facts(record)
        if record.name == EVENTS.name:
            words = [facts.pop("event"), *(f"{name}={_value(value)}" for name, value in facts.items())]
        else:
            words = [f"{record.name}:", "\n".join(map(printable, facts["message"].split("\n")))]
        return " ".join((_time(record), record.levelname.lower(), *words))


def _value(value: Any) -> str:
    """A value as one word; text with spaces is quoted."""
    text = printable(value if isinstance(value, str) else json.dumps(value, default=str))
    return text if text and not set(text) & set(" =\"'") else json.dumps(text, ensure_ascii=False)
