"""`txnbuf backup` and `txnbuf restore`: the whole of an embedded log in one file, and a log restored from it"""

from __future__ import annotations

import click

from broker_io import check_backup, is_cluster, restore_backup
from broker_io.errors import InvalidAddress, NotSupported
from broker_io.port import BackupBroker, BackupReport
from txnbuffer.cli.options import LogAddress, address_argument, log_options
from txnbuffer.cli.output import bytes_progress, output_option, show_record


@click.command("backup")
@address_argument
@click.argument("file", metavar="FILE")
@log_options
@output_option
def backup_command(log: LogAddress, file: str, output: str) -> None:
    """Write a backup of the embedded log file:DIR, which no service has open, to the new file FILE.

    FILE then holds all topics as they are at one moment, the service's own topics included. All checksums are verified:
    a backup of damaged data ends with exit code 4 and names the damaged file. Until it is complete, its name ends with
    .partial.

    Exit code 2 if the request is invalid or FILE exists, 4 if the backup failed, 5 if another process has the log.
    """
    log.check_not_in_memory()
    if is_cluster(log.address):
        raise _unsupported(log)
    if not log.address.startswith("file:"):
        raise InvalidAddress(f"{log.address!r} is not a directory: give file:DIR")
    log.open_for_reading().close()  # a directory without a log is refused, an owner would create one there
    with log.open_for_writing() as broker, bytes_progress(f"backup of {log.address}") as show:
        if not isinstance(broker, BackupBroker):
            raise _unsupported(log)
        report = broker.back_up(file, show)
    _show(report, output, file=file)


@click.command("restore")
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
        with bytes_progress(f"check of {file}") as show:
            report = check_backup(file, show)
        _show(report, output, file=file)
        return
    with bytes_progress(f"restore to {address}") as show:
        report = restore_backup(file, address, show)
    _show(report, output, file=file, log=address)


def _unsupported(log: LogAddress) -> NotSupported:
    return NotSupported(f"{log.address} does not store its topics itself, so it has no backup: back up its cluster")


def _show(report: BackupReport, output: str, **where: str) -> None:
    show_record({**where, **report._asdict()}, output)
