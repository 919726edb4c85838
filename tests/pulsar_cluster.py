"""The real Pulsar that tests run on: the first of these that is available.

`url`             the cluster at TXNBUFFER_PULSAR_URL (`pulsar://HOST:PORT`), its admin interface at
                  TXNBUFFER_PULSAR_ADMIN (default: port 8080 of that host);
`testcontainers`  a container of TXNBUFFER_PULSAR_IMAGE (default: the official image), if a Docker engine answers
                  and has the image or can pull it;
`standalone`      a process started from the server distribution, which Maven downloads into a cache.

TXNBUFFER_PULSAR_REQUIRE names one of them that is required. With PULSAR_PLUG_IN=1 brokers that are started have
the plug-in for plain consumers, but for those with Pulsar's own transactions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import json
import os
import tempfile
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pulsar_container import StandaloneContainer, distribution, end

from broker_io.port import PLUG_IN_SETTINGS
from broker_io.standalone import (
    SHORT_LIVED,
    NoPulsar,
    Standalone,
    StandaloneProcess,
    ask,
    is_up,
    make_namespace,
)
from broker_plugin.build import build

IMAGE = "apachepulsar/pulsar:4.0.8"
WAYS = ("url", "testcontainers", "standalone")
_STARTED: list[Standalone] = []  # reserves the ports until this process ends
PLUG_IN = os.environ.get("PULSAR_PLUG_IN") == "1"
NATIVE = "transactionCoordinatorEnabled=true"
REMEDY = "set TXNBUFFER_PULSAR_URL to a cluster, or start a Docker engine, or install Maven and Java 17"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A running cluster: `url` for clients, `admin` for REST, and `way`, how it was found."""

    way: str
    url: str
    admin: str

    def namespace(self) -> str:
        """Create a namespace, `public/…`, with a unique name."""
        return make_namespace(self.admin)

    def drop(self, namespace: str) -> None:
        """Delete a namespace with its topics, if the cluster allows it."""
        with contextlib.suppress(OSError):
            ask(self.admin, f"namespaces/{namespace}?force=true", "DELETE", seconds=10.0)

    @contextlib.contextmanager
    def private_standalone(
        self, settings: Sequence[str] = (), files: Mapping[str, str] | None = None, jar: Path | None = None
    ) -> Iterator[Standalone]:
        """A private broker on free ports, to `kill()` and `start()` again; with settings, files and one more jar."""
        with tempfile.TemporaryDirectory(prefix="pulsar-", ignore_cleanup_errors=True) as directory:
            way = "testcontainers" if self.way == "testcontainers" else "standalone"
            with make_standalone(way, Path(directory), settings, files, jar) as broker:
                yield broker


def choose() -> str:
    """The first available way, with everything that it requires downloaded. Raises NoPulsar if there is none."""
    required = os.environ.get("TXNBUFFER_PULSAR_REQUIRE", "")
    if required and required not in WAYS:
        raise NoPulsar(f"TXNBUFFER_PULSAR_REQUIRE is {required!r}: use one of {', '.join(WAYS)}")
    ways = [required] if required else WAYS
    reasons = []
    for way in ways:
        try:
            {"url": _url, "testcontainers": _engine_and_image, "standalone": distribution}[way]()
        except NoPulsar as reason:
            reasons.append(f"{way}: {reason}")
        else:
            return way
    remedy = f"make that work, or unset TXNBUFFER_PULSAR_REQUIRE={required}" if required else REMEDY
    raise NoPulsar(f"no Pulsar to test with ({'; '.join(reasons)}): {remedy}")


def _url() -> Cluster:
    url = os.environ.get("TXNBUFFER_PULSAR_URL", "")
    if not url:
        raise NoPulsar("TXNBUFFER_PULSAR_URL is not set")
    admin = os.environ.get("TXNBUFFER_PULSAR_ADMIN") or f"http://{urllib.parse.urlsplit(url).hostname}:8080"
    return Cluster("url", url, admin.rstrip("/"))


def _image() -> str:
    return os.environ.get("TXNBUFFER_PULSAR_IMAGE") or IMAGE


def _engine_and_image() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the client leaks a socket without an answer
        reason = _ask_engine(_image())
        gc.collect()
    if reason:
        raise NoPulsar(reason)


def _ask_engine(image: str) -> str:
    """Why no container of the image can be started; empty if the engine has the image now."""
    import docker
    from docker.errors import DockerException, ImageNotFound
    from requests.exceptions import RequestException

    try:
        client = docker.from_env(timeout=20)
    except (DockerException, RequestException):
        return "no Docker engine answers"
    try:
        client.images.get(image)
    except ImageNotFound:
        client.api.timeout = 900
        try:
            client.images.pull(image)
        except (DockerException, RequestException):
            return f"the Docker engine has no image {image} and can't pull it"
    except (DockerException, RequestException):
        return "no Docker engine answers"
    finally:
        client.close()
    return ""


def make_standalone(
    way: str,
    directory: Path,
    settings: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    jar: Path | None = None,
) -> Standalone:
    if jar is None and PLUG_IN and NATIVE not in settings:
        jar = build(directory / "txnbuffer-broker.jar")
        settings = [*settings, *(f"{name}={value}" for name, value in PLUG_IN_SETTINGS.items())]
    if way == "testcontainers":
        return StandaloneContainer(_image(), settings, files, jar)
    environment = {**SHORT_LIVED, **({"PULSAR_EXTRA_CLASSPATH": str(jar)} if jar else {})}
    return StandaloneProcess(distribution(), directory, settings, environment, files)


@contextlib.contextmanager
def shared(directory: Path) -> Iterator[Cluster]:
    """The cluster shared by all processes that use the same directory; the last one ends it.

    Each user holds a shared lock, which the kernel releases even if the user crashes. `gate` serializes arrivals and
    departures; `state` describes the cluster that the first one started, or why that failed, so that it is tried once.
    """
    state = directory / "pulsar.json"
    with (directory / "pulsar.users").open("a") as users:
        with _locked(directory / "pulsar.gate"):
            fcntl.flock(users, fcntl.LOCK_SH)
            if not state.exists():
                state.write_text(json.dumps(_start(directory / "pulsar")))
            found = json.loads(state.read_text())
        try:
            if "failure" in found:
                raise NoPulsar(found["failure"])
            yield Cluster(**found["cluster"])
        finally:
            with _locked(directory / "pulsar.gate"):
                if _is_last(users) and found.get("handle"):
                    end(found["handle"])
                    state.unlink()


def _start(directory: Path) -> dict[str, Any]:
    """Start a cluster; the content of `state`."""
    try:
        way = choose()
        if way == "url":
            cluster, handle = _url(), None
            if not is_up(cluster.admin):
                raise NoPulsar(
                    f"no healthy broker at {cluster.admin}, for TXNBUFFER_PULSAR_URL={cluster.url}: start it, set "
                    "TXNBUFFER_PULSAR_ADMIN if its admin interface is elsewhere, or unset both"
                )
        else:
            directory.mkdir(exist_ok=True)
            broker = make_standalone(way, directory).__enter__()
            _STARTED.append(broker)
            cluster, handle = Cluster(way, broker.url, broker.admin), broker.handle
    except NoPulsar as failure:
        return {"failure": str(failure)}
    return {"cluster": dataclasses.asdict(cluster), "handle": handle}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_last(users: Any) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    print("looking for a Pulsar to test with; the first time it may have to be downloaded", flush=True)
    try:
        print(f"tests use Pulsar by {choose()}")
    except NoPulsar as failure:
        raise SystemExit(str(failure)) from None
