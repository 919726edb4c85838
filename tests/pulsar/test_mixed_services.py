"""Services and clients of 0.2.0 and of this release on one namespace of a Pulsar, with two shards."""

from __future__ import annotations

from pathlib import Path

from mixed_releases import NEW, OLD, Writers, check, environment, read, unpacked
from pulsar_cluster import Cluster
from service_process import ServiceProcess

SHARDS = 2


def test_shards_of_both_releases_take_over_from_each_other(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    """Each shard has an active service of one release and a standby of the other one; the active ones are killed."""
    trees = unpacked(tmp_path / "release")
    address = f"{cluster.url}/{namespace}"
    running: list[ServiceProcess] = []

    def start(shard: int, release: str) -> ServiceProcess:
        flags = ["--admin-url", cluster.admin, "--shards", str(SHARDS), "--shard", str(shard), "--standby"]
        python, variables = ("-P", "-m", "txnbuffer"), environment(trees[release])
        running.append(ServiceProcess(address, *flags, python=python, environment=variables))
        return running[-1]

    try:
        active = [start(0, OLD), start(1, NEW)]
        for service in active:
            service.wait_serving()
        standby = [start(0, NEW), start(1, OLD)]
        with Writers(trees, tmp_path, address, cluster.admin) as writers:
            for releases in ((OLD, NEW), (NEW, OLD), None):
                writers.progress()
                if releases is None:
                    break
                for shard, release in enumerate(releases):
                    standby[shard].wait_event("standing by")
                    active[shard].kill()
                    active[shard], standby[shard] = standby[shard].wait_serving(), start(shard, release)
            written = writers.stop()
        first, second = [
            read(trees[release], tmp_path / "reader.stderr", address, cluster.admin) for release in (OLD, NEW)
        ]
        assert first == second
        check(first, written, numbered=False)
    finally:
        for service in running:
            if service.process.poll() is None:
                service.kill()
