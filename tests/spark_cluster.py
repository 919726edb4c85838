"""A small Spark cluster on loopback: a standalone master, workers and drivers, each a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from spark_driver import SETTINGS

from txnbuffer.cli import submit

SECONDS = 400.0
"""Timeout of all waits, on a machine that is busy with other tests."""
DAEMON = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto -Dspark.master.rest.enabled=false "
    "-Dspark.master.ui.enabled=false -Dspark.worker.timeout=600"
)
"""With these options the master keeps a worker that is slow on a busy machine."""


class SparkProcess:
    """A process whose output lines can be waited for."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._told = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._told:
                self.lines.append(line)
                self._told.notify_all()
        with self._told:
            self._ended = True
            self._told.notify_all()

    def line(self, pattern: str) -> re.Match[str]:
        """Wait for the first line that matches."""
        with self._told:
            self._told.wait_for(lambda: self._ended or self._find(pattern) is not None, SECONDS)
            found = self._find(pattern)
        assert found is not None, f"no {pattern} in:\n{''.join(self.lines[-100:])}"
        return found

    def _find(self, pattern: str) -> re.Match[str] | None:
        return next((found for line in self.lines if (found := re.search(pattern, line)) is not None), None)

    def end(self, *, gently: bool = True) -> None:
        """End the process with SIGTERM, so that a worker ends its executors, or kill it; then kill its children."""
        if gently:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS)
        self._reader.join(SECONDS)  # the pipe ends with the last process that has it open
        assert not self._reader.is_alive()
        assert self.process.stdout is not None
        self.process.stdout.close()


class SparkCluster:
    """A master and workers of one core; `url` is the address for drivers.

    Each worker has its own loopback address, because Spark speculates on other hosts only.
    """

    def __init__(self, directory: Path, workers: int = 2) -> None:
        self._processes: list[SparkProcess] = []
        try:
            master = self._start("master.Master", "127.0.0.1", "--port", "0")
            self.url = master.line(r"Starting Spark master at (spark://\S+)")[1]
            for number in range(workers):
                place = ["--work-dir", str(directory / f"worker{number}")]
                self._start(
                    "worker.Worker", f"127.0.0.{2 + number}", "--cores", "1", "--memory", "600M", *place, self.url
                )
            for worker in self._processes[1:]:
                worker.line("Successfully registered with master")
        except BaseException:
            self.__exit__()
            raise

    def _start(self, name: str, host: str, *arguments: str) -> SparkProcess:
        import pyspark

        launcher = f"{os.path.dirname(pyspark.__file__)}/bin/spark-class"
        command = [launcher, f"org.apache.spark.deploy.{name}", "--host", host, "--webui-port", "0", *arguments]
        environment = {"SPARK_LOCAL_IP": host, "SPARK_DAEMON_MEMORY": "200m", "SPARK_DAEMON_JAVA_OPTS": DAEMON}
        self._processes.append(SparkProcess(command, environment))
        return self._processes[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.end()


class Submitted:
    """A job under spark-submit; it can access the files of this process."""

    def __init__(self, master: str, *arguments: str) -> None:
        import pyspark

        launcher = f"{os.path.dirname(pyspark.__file__)}/bin/spark-submit"
        settings = [word for name, text in SETTINGS.items() for word in ("--conf", f"{name}={text}")]
        path = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [launcher, "--master", master, *settings, submit.__file__, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        )

    def finish(self) -> Any:
        """Wait for the end; the result as JSON. Spark also prints the script's stderr to stdout, before the result."""
        try:
            out, told = self.process.communicate(timeout=SECONDS)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.communicate()
        assert self.process.returncode == 0, told
        return json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("[")))


class Driver(SparkProcess):
    """A `spark_driver.py` process; it prints results as lines `NAME: JSON`."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("spark_driver.py")), *arguments]
        super().__init__(command, {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})

    def said(self, name: str) -> Any:
        return json.loads(self.line(rf"^{name}: (.*)")[1])
