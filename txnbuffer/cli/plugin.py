"""`txnbuf plugin`: the plug-in of brokers that shows plain consumers only what committed"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import click

from broker_io.errors import EnvironmentFault
from broker_io.port import PLUG_IN_SETTINGS, Broker, PlugInBroker
from broker_io.standalone import minor_versions
from txnbuffer.cli.commands import CommandGroup, cluster_argument
from txnbuffer.cli.options import LogAddress, log_options
from txnbuffer.cli.output import narrate, output_option, show_rows
from txnbuffer.errors import InvalidRequest
from txnbuffer.plug_in import PlugInState, plug_ins_of

JARS = Path(str(files("txnbuffer") / "jars"))
"""One jar for each supported minor version of Pulsar; the build of a release writes them."""
INSTALLED = "txnbuffer-broker.jar"


class NoPlugIn(EnvironmentFault):
    """This installation has no jar of the plug-in, or none for a version of Pulsar."""


@click.group("plugin", cls=CommandGroup)
def plugin_command() -> None:
    """The plug-in of Pulsar's brokers that shows plain consumers only what committed."""


@plugin_command.command("check")
@cluster_argument
@log_options
@output_option
def check_plugin(log: LogAddress, output: str) -> None:
    """Show whether each broker of the cluster at ADDRESS, pulsar://HOST:PORT, has the plug-in, and what it lacks.

    A broker that lacks it shows plain consumers everything. Asks each broker at its own web address, so run it where
    these can be reached. The setting for locked namespaces is checked by `txnbuf plugin lock`.

    Requires the credentials of a superuser of the cluster, such as --set pulsar.token_file=FILE. If the admin interface
    is not at port 8080 of HOST, add --set pulsar.admin_url=URL.

    Exit code 0 if all brokers have it, 1 if not.
    """
    with log.open_for_reading() as broker:
        found = plug_ins_of(_cluster(broker))
    rows = [
        {
            **one._asdict(),
            "missing": ", ".join(one.missing),
            "reads": ", ".join(f"{name} {version}" for name, version in one.reads.items()),
        }
        for one in found.brokers
    ]
    show_rows(rows, output, title="plug-in")
    sys.exit(0 if found.state is PlugInState.ALL else 1)


def _cluster(broker: Broker) -> PlugInBroker:
    if not isinstance(broker, PlugInBroker):
        raise TypeError(f"{broker!r} is of a cluster, and knows no plug-in")
    return broker


@plugin_command.command("lock")
@cluster_argument
@click.option("--release", is_flag=True, help="Let any broker serve the namespace again.")
@log_options
def lock_namespace(log: LogAddress, release: bool) -> None:
    """Let only brokers with the plug-in serve a namespace: that of ADDRESS, pulsar://HOST:PORT/TENANT/NAMESPACE.

    Sets a storage class in the persistence policy of the namespace, which holds for all topics that are loaded from now
    on. Brokers have this class by the setting managedLedgerStorageClassName=txnbuffer.broker.LockedStorage. All of them
    need it: those that lack it, or the plug-in, refuse the topics.

    Requires the credentials of a superuser of the cluster, such as --set pulsar.token_file=FILE. If the admin interface
    is not at port 8080 of HOST, add --set pulsar.admin_url=URL.
    """
    with log.open_for_reading() as broker:
        _cluster(broker).lock_plug_in(locked=not release)
    narrate(f"{log.place} is {'served by any broker' if release else 'locked'}")


@plugin_command.command("install")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def install_plugin(directory: Path) -> None:
    """Write the jar of the plug-in into DIR, the lib/ of a broker, and print what its broker.conf needs.

    A jar that is there is replaced; a broker uses the new one after a restart. For brokers on other machines, or an
    image, write it to any DIR, and copy it to their lib/, or name it in PULSAR_EXTRA_CLASSPATH.
    """
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} is not a directory: give the lib/ of a broker")
    jar = jar_of(directory)
    try:
        replace(directory / INSTALLED, jar.read_bytes())
    except OSError as error:
        raise EnvironmentFault(f"cannot write {directory / INSTALLED}: {error.strerror}") from error
    click.echo("\n".join(f"{name}={value}" for name, value in PLUG_IN_SETTINGS.items()))
    narrate(f"wrote {directory / INSTALLED}; set the above in broker.conf, and restart the broker")


def jar_of(lib: Path) -> Path:
    """The jar for the broker whose `lib` this is, or the only one. Raises NoPlugIn."""
    found = {path.stem.removeprefix("txnbuffer-broker-"): path for path in sorted(JARS.glob("txnbuffer-broker-*.jar"))}
    if not found:
        raise NoPlugIn(
            "this installation was built without the jar of the plug-in: run make plugin in the source tree, which "
            "needs a JDK 17 and Maven, and install from there, or install a released wheel"
        )
    versions = minor_versions(lib) or {*found}
    if len(versions) != 1:
        raise NoPlugIn(f"there are jars for Pulsar {', '.join(sorted(versions))}: give the lib/ of a broker as DIR")
    (version,) = versions
    if version not in found:
        raise NoPlugIn(f"{lib} belongs to Pulsar {version}, and there are jars for {', '.join(found)} only")
    return found[version]


def replace(path: Path, content: bytes) -> None:
    """Write a file; a JVM that runs with the former one keeps that."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".txnbuffer-broker.", delete=False) as made:
        try:
            made.write(content)
            made.flush()
            os.fsync(made.fileno())
            os.fchmod(made.fileno(), 0o644)
            os.replace(made.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(made.name)
            raise
