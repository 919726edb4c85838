"""The file system of an embedded log becomes read-only under writing clients.

    make stress ONLY=read_only_disk          (root, for a mounted file system)

The log is on an ext4 image that is mounted with `errors=remount-ro`. In each round writers commit, then the kernel is
made to find an error in that file system and so remounts it read-only. Promises: the service ends with exit code 4 and
an error that names the file and the reason; while the file system is read-only, no service starts, and its error names
them too; a reader of the directory then finds all records of every transaction that was answered as committed, and
shows none that is doubled or was not committed (it waits at a decision whose markers are still missing); once the file
system is checked and writable again, a service serves, the same clients continue, and in the end nothing is lost,
doubled, partial or dirty. An operator's own `mount -o remount,ro` is refused by the kernel while a service has files
open for writing.

`FileSizeLimit` needs no privileges: the running service gets a limit on the size of its files, so that its next write
fails. Everything above holds for it, except that the next service can start at once.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Protocol

from service_process import ServiceProcess, kept_port
from stress.processes import Children, Report, Writers, counted, settings

from broker_io import open_broker

IMAGE_MIB = 256
SETTINGS = settings("log.watermark_bytes=1000000", "transactions.session_timeout=20", "log.segment_bytes=1000000")
DISK_FAILED = 4


class Failure(Protocol):
    """A way to make the writes of a service fail; it works on the directory `directory`."""

    directory: Path
    errors: tuple[str, ...]

    def fail(self, service: ServiceProcess) -> None: ...
    def starts_while_failed(self) -> bool: ...
    def mend(self) -> None: ...
    def close(self) -> None: ...


class FileSizeLimit:
    errors = ("File too large",)

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def fail(self, service: ServiceProcess) -> None:
        _, hard = resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (1, hard))

    def starts_while_failed(self) -> bool:
        return True

    def mend(self) -> None: ...

    def close(self) -> None: ...


class MountedImage:
    """An ext4 image on a loop device; requires root."""

    errors = ("Read-only file system", "Input/output error")  # the second one while the journal is aborted

    def __init__(self, directory: Path) -> None:
        self._image, self.directory = directory / "image", directory / "mounted"
        self.directory.mkdir()
        run("truncate", "-s", f"{IMAGE_MIB}M", str(self._image))
        run("mkfs.ext4", "-q", str(self._image))
        self._device = run("losetup", "--find", "--show", str(self._image))
        assert self._device.startswith("/dev/loop")
        self._mount("rw")

    @staticmethod
    def missing() -> list[str]:
        """What this machine lacks."""
        programs = ("mkfs.ext4", "e2fsck", "losetup", "mount", "umount", "truncate")
        missing = [f"the program {name}" for name in programs if shutil.which(name) is None]
        if missing:
            return missing
        with tempfile.NamedTemporaryFile() as image:
            image.truncate(1 << 20)
            try:
                run("losetup", "--detach", run("losetup", "--find", "--show", image.name))
            except AssertionError as error:
                return [f"a loop device, which requires root: {error}"]
        return []

    def fail(self, service: ServiceProcess) -> None:
        """Report an error of the file system to the kernel."""
        remount = subprocess.run(["mount", "-o", "remount,ro", str(self.directory)], capture_output=True, check=False)
        assert b"busy" in remount.stderr, "a file system with files open for writing was remounted read-only"
        Path("/sys/fs/ext4", Path(self._device).name, "trigger_fs_error").write_text("an error for a test")

    def starts_while_failed(self) -> bool:
        return False

    def mend(self) -> None:
        """Check the file system, mount it read-only, as after a restart of the machine, and make it writable."""
        run("umount", str(self.directory))
        subprocess.run(["e2fsck", "-p", self._device], capture_output=True, check=False)  # 1: it was corrected
        self._mount("ro")
        run("mount", "-o", "remount,rw", str(self.directory))

    def close(self) -> None:
        run("umount", str(self.directory))
        run("losetup", "--detach", self._device)

    def _mount(self, how: str) -> None:
        run("mount", "-o", f"{how},errors=remount-ro", self._device, str(self.directory))


def run(*command: str) -> str:
    """The output of a command. Raises AssertionError with its errors."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout.strip()


class Check:
    def __init__(self, failure: Failure, diaries: Path, writers: int) -> None:
        self.report = Report()
        self._failure = failure
        self._log = failure.directory / "log"
        self._port = kept_port()
        self._children = Children()
        self._service = self._serve()
        self._service.wait_serving()
        self._writers = Writers(self._children, diaries, f"txnbuf://127.0.0.1:{self._port}", writers)

    def run(self, rounds: int) -> Report:
        ends = [self._round() for _ in range(rounds)]
        self._writers.wait_for_commits()
        self._writers.stop()
        self._service.terminate()
        self.report.expect(self._service.finish() == 0, f"a clean end: {''.join(self._service.lines)}")
        with open_broker(f"file:{self._log}") as broker:
            found = self._writers.judge(broker)
        self.report.expect(found.good, "what was answered is in the log, once and whole")
        reasons = Counter(reason for end in ends for reason in self._failure.errors if reason in end)
        self.report.figures |= {"rounds": rounds, "errors": reasons} | counted(found)
        return self.report

    def close(self) -> None:
        self._children.close()
        if self._service.process.poll() is None:
            self._service.kill()
        self._failure.close()

    def _round(self) -> str:
        """One failure of the disk; the error with which the service ended."""
        report, errors = self.report, self._failure.errors
        self._writers.wait_for_commits()
        self._failure.fail(self._service)
        code, last = self._service.finish(), self._service.lines[-1].strip()
        report.expect(code == DISK_FAILED, f"exit code {DISK_FAILED}, not {code}")
        report.expect(any(error in last for error in errors), f"an error that names one of {errors}: {last}")
        if not self._failure.starts_while_failed():
            refused = self._serve()
            code, text = refused.finish(), refused.lines[-1].strip()
            report.expect(code == DISK_FAILED and errors[0] in text, f"no service starts on it: {code}, {text}")
        self._read_offline()
        self._failure.mend()
        self._service = self._serve()
        self._service.wait_serving()
        return last

    def _read_offline(self) -> None:
        with open_broker(f"file:{self._log}", read_only=True) as broker:
            stored, visible = self._writers.judge(broker, "read_uncommitted"), self._writers.judge(broker)
        self.report.expect(not stored.lost, "everything that was answered as committed is stored")
        self.report.expect(not visible.doubled + visible.uncommitted_seen, "a reader sees committed records, once")

    def _serve(self) -> ServiceProcess:
        return ServiceProcess(self._log, *SETTINGS, port=self._port)


def check(failure: Failure, diaries: Path, *, rounds: int, writers: int = 2) -> Report:
    with closing(Check(failure, diaries, writers)) as running:
        return running.run(rounds)


def full(directory: Path) -> Report:
    """The check on both kinds of failure; without root on the second one only."""
    unprivileged = directory / "limited"
    unprivileged.mkdir()
    report = check(FileSizeLimit(unprivileged), unprivileged, rounds=5)
    report.figures = {"file size limit": report.figures}
    report.missing = MountedImage.missing()
    if not report.missing:
        mounted = check(MountedImage(directory), directory, rounds=10)
        report.figures["read-only ext4"] = mounted.figures
        report.wrong += mounted.wrong
    return report
