"""Whether the brokers of a cluster show plain consumers only what committed, and can read what this release writes

`txnbuf plugin check` and the service ask the same question: `plug_ins_of`.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from broker_io.errors import Error
from broker_io.port import Broker, BrokerPlugIn, PlugInBroker
from snapshots.format import END, SEGMENT, versions_of
from txnbuffer.errors import PlugInMissing
from txnbuffer.model import PROTOCOL_VERSION

WRITTEN = {"protocol": PROTOCOL_VERSION, **{kind: int(versions_of(kind)[-1]) for kind in (END, SEGMENT)}}
"""The formats that a plug-in has to read, and their versions that this release writes."""


class PlugInState(enum.Enum):
    """How many brokers of a cluster have the plug-in."""

    UNKNOWN = "unknown"
    NONE = "none"
    SOME = "some"
    ALL = "all"


class PlugIns(NamedTuple):
    """The brokers of a cluster, and what each lacks: `missing` includes formats that it can't read."""

    brokers: tuple[BrokerPlugIn, ...] = ()

    @property
    def state(self) -> PlugInState:
        if not self.brokers:
            return PlugInState.UNKNOWN
        if not any(one.plug_in or not one.missing for one in self.brokers):
            return PlugInState.NONE
        return PlugInState.SOME if any(one.missing for one in self.brokers) else PlugInState.ALL

    def after(self, former: PlugIns) -> PlugIns:
        """With the former answers of brokers that do not answer now: they are restarting, or are gone."""
        known = {one.broker: one for one in former.brokers if one.version}
        return PlugIns(tuple(one if one.version else known.get(one.broker, one) for one in self.brokers))

    @property
    def present(self) -> bool | None:
        """Whether a broker has the plug-in; None if that is unknown."""
        return None if self.state is PlugInState.UNKNOWN else self.state is not PlugInState.NONE

    @property
    def lacking(self) -> PlugInMissing | None:
        """The error that names the brokers that lack something."""
        lacking = {one.broker: one.missing for one in self.brokers if one.missing}
        if not lacking:
            return None
        return PlugInMissing(
            f"brokers without the whole plug-in show plain consumers everything, or nothing: {_which(lacking)}: see "
            "docs/plain-consumers.md"
        )

    @property
    def outdated(self) -> PlugInMissing | None:
        """The error that names the brokers whose plug-in can't read what this release writes."""
        outdated = {one.broker: unread for one in self.brokers if one.plug_in and (unread := _unread(one))}
        if not outdated:
            return None
        return PlugInMissing(
            "the plug-in of brokers can't read what this release writes, and would stop their topics: "
            f"{_which(outdated)}: install the jar of this release on them first"
        )


def _which(lacking: Mapping[str, Sequence[str]]) -> str:
    """What brokers lack, by their address."""
    return "; ".join(f"{broker} lacks {', '.join(missing)}" for broker, missing in lacking.items())


def plug_ins_of(broker: PlugInBroker) -> PlugIns:
    """Ask all brokers. Raises NotAuthorized if only superusers may ask, and ServiceUnavailable."""
    found = broker.plug_ins()
    return PlugIns(tuple(one._replace(missing=one.missing + _unread(one)) for one in found))


def check_readable(broker: Broker) -> None:
    """Raises PlugInMissing if a plug-in of the cluster can't read what this release writes, as far as that is known."""
    found = PlugIns()
    if isinstance(broker, PlugInBroker):
        with contextlib.suppress(Error):  # not allowed, or not now: the service asks again
            found = plug_ins_of(broker)
    if (outdated := found.outdated) is not None:
        raise outdated


def _unread(one: BrokerPlugIn) -> tuple[str, ...]:
    """What a plug-in can't read of what this release writes."""
    if not one.plug_in:
        return ()
    return tuple(
        f"version {version} of {name}" for name, version in WRITTEN.items() if one.reads.get(name, 0) < version
    )
