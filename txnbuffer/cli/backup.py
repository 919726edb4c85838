"""`txnbuf backup` and `txnbuf restore`: the whole of an embedded log in one file, and a log restored from it"""

from __future__ import annotations

import click

from broker_io import check_backup, is_cluster, restore_backup
from broker_io.environment import current
from broker_io.errors import NotSupported, ServiceUnavailable
from broker_io.port import BackupBroker, BackupProgress
from txnbuffer.cli.admin_client import ServiceAddress, call_owner
from txnbuffer.cli.commands import AddressCommand, address_argument
from txnbuffer.cli.options import LogAddress, log_options
from txnbuffer.cli.output import narrate, output_option, show_record
from txnbuffer.errors import BackupFailed
from txnbuffer.progress import BYTES, report

POLL_SECONDS = 0.2


@click.command("backup", cls=AddressCommand)
@address_argument
@click.argument("file", metavar="FILE")
@log_options
@output_option
def backup_command(log: LogAddress, file: str, output: str) -> None:
    """Write a backup of the log at ADDRESS to the new file FILE.

    ADDRESS is file:DIR, a log that no service has open, or txnbuf://HOST:PORT, a service that has one. The service
    writes FILE on its own machine, so it must be an absolute path there; transactions continue meanwhile.

    FILE then holds all topics as they are at one moment, the service's own topics included. All checksums are verified:
    a backup of damaged data ends with exit code 4 and names the damaged file. Until it is complete, its name ends with
    .partial. If you interrupt the command (Ctrl-C), a service continues to write.

    Exit code 2 if the request is invalid or FILE exists, 3 if the service can't be reached or ended, 4 if the backup
    failed, 5 if another process has the log.
    """
    log.check_not_in_memory()
    if is_cluster(log.address):
        raise _unsupported(log)
    with report(f"backup of {log.address}", BYTES) as progress:
        if log.address.startswith("file:"):
            done = _back_up(log, file, progress.update)
        else:
            done = _ask_for_backup(ServiceAddress(log.address, log.access), file, progress.update)
    show_record({"file": file, **done}, output)


def _back_up(log: LogAddress, file: str, show: BackupProgress) -> dict[str, int]:
    """Own a log, and write its backup."""
    log.open_for_reading().close()  # a directory without a log is refused, an owner would create one there
    with log.open_for_writing() as broker:
        if not isinstance(broker, BackupBroker):
            raise _unsupported(log)
        return broker.back_up(file, show)._asdict()


def _ask_for_backup(service: ServiceAddress, file: str, show: BackupProgress) -> dict[str, int]:
    """Let a service write a backup of its log, and wait for its end. Raises BackupFailed."""
    number = call_owner(service, "BackUp", path=file)["run"]
    try:
        while True:
            rows = call_owner(service, "Backups")
            if not rows or rows[0]["run"] != number or rows[0]["path"] != file:
                raise ServiceUnavailable(f"the backup {file} was not written: the service has ended meanwhile")
            run = rows[0]
            show(run["bytes_done"], run["bytes_expected"])
            if run["problem"] is not None:
                raise BackupFailed(file, run["problem"])
            if run["report"] is not None:
                written: dict[str, int] = run["report"]
                return written
            current().clock.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        narrate("interrupted: the service continues to write the backup")
        raise


@click.command("restore", cls=AddressCommand)
@click.argument("file", metavar="FILE")
@click.argument("address", metavar="ADDRESS", required=False)
@click.option("--check", is_flag=True, help="Verify FILE without restoring anything.")
@output_option
def restore_command(file: str, address: str | None, check: bool, output: str) -> None:
    """Restore the backup FILE as the embedded log file:DIR, a missing or empty directory; or verify it with --check.

    Everything is verified while it is written, and no service opens the directory before the restore is complete. The
    restored log is an older state: no position, transaction id or epoch of the lost messages comes back, and clients,
    streams, relays and queries that have read them notice it.

    Exit code 2 if the request is invalid or the directory is not empty, 4 if FILE is damaged or the disk failed.
    """
    if check == (address is not None):
        raise click.UsageError("give either ADDRESS or --check")
    if address is None:
        with report(f"check of {file}", BYTES) as progress:
            checked = check_backup(file, progress.update)
        show_record({"file": file, **checked._asdict()}, output)
        return
    with report(f"restore to {address}", BYTES) as progress:
        restored = restore_backup(file, address, progress.update)
    show_record({"file": file, "log": address, **restored._asdict()}, output)


def _unsupported(log: LogAddress) -> NotSupported:
    return NotSupported(f"{log.address} does not store its topics itself, so it has no backup: back up its cluster")
