"""The process of a job that starts all others, watches them, and decides what becomes of the job.

It runs on the job's first node, in place of the shell that Slurm started. When the command ends the job ends, with its
exit status. If the scheduler ends first, or ``srun`` with the workers, the job ends within seconds, with the reason: no
allocation waits for what does not come back. A job that is asked to end, by SIGTERM to this process or to the workers,
hands that on to the command, which drains, and then queues itself again.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tilewright.pipeline import config
from tilewright.pipeline.cluster.node.places import (
    LOOPBACK,
    Wanted,
    folder_here,
    free_ports,
    is_free,
    ports_of,
)
from tilewright.pipeline.cluster.profiler import profiler_off
from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.batch import INSIDE, slurm
from tilewright.workflows.batch.certificates import certificates, environment_of
from tilewright.workflows.batch.children import ending_with_parent
from tilewright.workflows.batch.folder import (
    INSIDE_PROFILE,
    INSIDE_TRY,
    JobFolder,
    Progress,
    Submitted,
)
from tilewright.workflows.batch.profile import BatchProfile, job_settings

LOOK_SECONDS = 0.2
"""How often the processes are looked at."""
SCHEDULER_SECONDS = 120
"""How long the scheduler may take to start: seconds, or a minute where all that it imports comes from a slow disk."""
CLIENT_SECONDS = 10
"""How long the command may take to end by itself once its cluster is gone: it knows best what to say. It has kept all
that is finished."""
BEHIND_GRACE_SECONDS = 15
"""How long a command that was asked to end may take beyond its grace, to record and to end."""
REQUEUED_SECONDS = 60
"""How long Slurm may take to end a job that is queued again."""
END_SECONDS = 5
"""How long scheduler and workers may take to end before they are killed."""
STOPPED = 128 + signal.SIGTERM
LAUNCHER = "tilewright.workflows.batch.launcher"
CLIENT = "tilewright.workflows.batch.inside"
LABEL = re.compile(r"^\d+: ")
"""What ``srun --label`` puts before the lines of a task."""
SLURMS = ("srun: ", "slurmstepd", "the workers of task ")
"""How lines begin that only say that there is an end."""
TEMPORARY = "DASK_TEMPORARY_DIRECTORY"
"""Dask's setting of the folder of temporary files, which Tilewright's go by too."""
QUIET = {"DASK_LOGGING__DISTRIBUTED": "warning"}
"""For what Dask logs of scheduler and workers."""


@dataclass
class Keeper:
    """One try of a job."""

    folder: JobFolder
    submitted: Submitted
    job: str
    attempt: int
    """From 1."""
    environment: Mapping[str, str]
    stopping: str = ""
    """How the job was asked to end; empty where it was not."""
    _started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ports: list[int] = field(default_factory=lambda: [0])
    """What is left of the ports that the scheduler may have; the first is its own. 0: any."""
    _certificates: dict[str, str] = field(default_factory=dict)
    """Files, under their names in Dask's ``Security``."""

    @property
    def profile(self) -> BatchProfile:
        return self.submitted.profile

    def keep(self) -> int:
        """The exit status of the job."""
        before = self.folder.progress()
        if before is not None and before.phase == "ended" and before.status == 0:
            return 0  # it had finished when a node failed, for which Slurm starts it again
        if self.attempt > self.profile.tries:
            return self._end(f"it has been started {self.profile.tries} times, which is all its tries", 1)
        self._note("started")
        try:
            reason, status = self._run()
        finally:
            self._end_all()
            self.folder.remove_certificates()
        return self._end(reason, status)

    def stop(self, how: str) -> None:
        """Have the job end; a signal's handler may call this."""
        self.stopping = self.stopping or how

    def _run(self) -> tuple[str, int]:
        """Why the job ends, if the command itself does not say, and its status."""
        address = self.folder.scheduler_file(self.attempt)
        self.folder.remove_certificates()  # of a try whose node has failed
        try:
            self._certificates = certificates(self.profile, self.folder, self.attempt)
        except (ClusterError, OSError) as error:
            return f"it has no certificates: {error}", 1
        encrypted = environment_of(self._certificates)
        try:
            scratch = self._scratch()
            self._ports = self._scheduler_ports()
        except ClusterError as error:
            return str(error), 1
        if (ended := self._start_scheduler(address, QUIET | encrypted)) is not None:
            return ended
        self._start("workers", self._workers_command(), QUIET | encrypted | self._cores())
        self._start("command", self._client_command(address), self._settings() | scratch)
        return self._watch()

    def _start_scheduler(self, address: Path, more: Mapping[str, str]) -> tuple[str, int] | None:
        """Start the scheduler, and wait until it has said where it is; or why the job ends."""
        until = time.monotonic() + SCHEDULER_SECONDS
        self._start("scheduler", self._scheduler_command(address), more)
        while not (address.is_file() and address.stat().st_size):
            if self._asked_to_end():
                return self._stopped(None)
            if (ended := self._ended("scheduler")) is not None:
                if len(self._ports) == 1 or is_free(self._ports[0]):
                    return ended, 1
                # Somebody has taken it since it was looked at, such as another job of this node.
                self._ports = self._ports[1:]
                self._start("scheduler", self._scheduler_command(address), more)
            if time.monotonic() > until:
                return (
                    f"its scheduler has not started within {SCHEDULER_SECONDS} s{self._said('scheduler')}",
                    1,
                )
            time.sleep(LOOK_SECONDS)
        return None

    def _scheduler_ports(self) -> list[int]:
        """Those that the scheduler may have, the first of which it gets; 0 is any. Raises ClusterError where the
        profile's are all taken."""
        if self.profile.scheduler_port is None:
            return [0]
        ports = ports_of("the profile", "scheduler_port", self.profile.scheduler_port)
        free = [port for port in ports if is_free(port)]
        return free or free_ports("the profile", Wanted("scheduler_port", ports, 1, "the scheduler"))

    def _scratch(self) -> dict[str, str]:
        """What has the command keep temporary files where the workers do, unless somebody has said another place.
        Raises ClusterError where this node has no such folder."""
        if self.profile.local_directory is None or TEMPORARY in self.environment:
            return {}
        return {TEMPORARY: folder_here("the profile", self.profile.local_directory)}

    def _watch(self) -> tuple[str, int]:
        command = self._started["command"]
        while command.poll() is None:
            if self._asked_to_end():
                return self._stopped(command)
            for who in ("scheduler", "workers"):
                if (ended := self._ended(who)) is not None:
                    self._end_command(command, CLIENT_SECONDS)
                    if not command.returncode:
                        return "", 0  # it was nearly done
                    if self._asked_to_end():  # which may end the workers first
                        return self._stopped(command)
                    return ended, max(command.returncode, 1)
            time.sleep(LOOK_SECONDS)
        return "", _status(command)

    def _stopped(self, command: subprocess.Popen[bytes] | None) -> tuple[str, int]:
        """What becomes of a job that was asked to end."""
        self._note("stopping", self.stopping)
        if command is not None:
            if command.poll() is None:
                self._say(f"job {self.job} was asked to end ({self.stopping})")
                command.send_signal(signal.SIGTERM)
                self._end_command(command, config.get("grace-seconds") + BEHIND_GRACE_SECONDS)
            lost = any(self._started[who].poll() is not None for who in ("scheduler", "workers"))
            if command.returncode >= 0 and command.returncode != STOPPED and not lost:
                return "", command.returncode  # it was nearly done, or has failed by itself
        return self._queued_again() or (f"it was asked to end ({self.stopping})", STOPPED)

    def _queued_again(self) -> tuple[str, int] | None:
        """Queue the job again if it has tries left, and nobody has cancelled it; then this is not to return."""
        left = self.profile.tries - self.attempt
        if not left:
            if self.profile.tries > 1:
                self._say(f"job {self.job} has had all of its {self.profile.tries} tries")
            return None
        try:
            state = slurm.look_at(self.job).state
            if state in slurm.ENDED or state in slurm.ENDING:
                return None
            self._note("queued again", self.stopping)
            slurm.requeue(self.job)
        except ClusterError as error:
            return f"it was asked to end ({self.stopping}), and is not queued again: {error}", STOPPED
        time.sleep(REQUEUED_SECONDS)
        return f"it was asked to end ({self.stopping}), and Slurm has not ended it to start it again", STOPPED

    def _asked_to_end(self) -> bool:
        if not self.stopping and self.folder.stop_file(self.attempt).exists():
            self.stop("SIGTERM to its workers")
        return bool(self.stopping)

    def _scheduler_command(self, address: Path) -> list[str]:
        where = [] if self.profile.interface is None else ["--interface", self.profile.interface]
        if self.profile.host is not None:
            where = ["--host", self.profile.host]
        if self._certificates:
            where += ["--protocol", "tls"]
        options = ["--scheduler-file", str(address), "--port", str(self._ports[0]), *where]
        # What it serves by HTTP, also without a dashboard, is not encrypted; it gets a free port too.
        shown = self.profile.dashboard_address
        options += ["--no-dashboard" if shown is None else "--dashboard"]
        options += ["--dashboard-address", shown or f"{LOOPBACK}:0"]
        return [sys.executable, "-m", "dask", "scheduler", *options]

    def _workers_command(self) -> list[str]:
        profile, tasks = self.profile, self.profile.nodes * self.profile.tasks
        options = [f"--nodes={profile.nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={profile.tasks}"]
        options.append(f"--cpus-per-task={profile.cpus}")  # which srun does not take over from the job
        if profile.gpus_per_node is not None:
            options.append(f"--gpus-per-node={profile.gpus_per_node}")
        options += ["--kill-on-bad-exit=0", "--label", "--input=none"]
        return ["srun", *options, sys.executable, "-m", LAUNCHER, str(self.folder.path), str(self.attempt)]

    def _client_command(self, address: Path) -> list[str]:
        existing: dict[str, Any] = {"kind": "existing", "scheduler_file": str(address)}
        if self._certificates:
            existing["security"] = dict(self._certificates)
        self.folder.profiles.write_text(
            yaml.safe_dump({"profiles": {INSIDE_PROFILE: existing}}), encoding="utf-8"
        )
        return [sys.executable, "-m", CLIENT, str(self.folder.path)]

    def _cores(self) -> dict[str, str]:
        """What lets a worker without a GPU multiply on all of its cores; Dask would have it use one."""
        return {} if self.profile.gpus else {"OMP_NUM_THREADS": str(self.profile.cpus)}

    def _settings(self) -> dict[str, str]:
        """Of the command."""
        found = {INSIDE: str(self.folder.profiles), INSIDE_TRY: str(self.attempt)}
        if self.attempt > 1:  # a node may have failed after C had its name, and before that was noted
            found["DASK_TILEWRIGHT__ACCEPT_FINISHED"] = "true"
        for name, value in job_settings(self.profile).items():
            found[f"DASK_TILEWRIGHT__{name.upper().replace('-', '_')}"] = str(value)
        return found

    def _start(self, who: str, command: list[str], more: Mapping[str, str]) -> None:
        environment = profiler_off() | dict(self.environment) | dict(more)
        command = ending_with_parent(command)
        if who == "command":
            self._started[who] = subprocess.Popen(command, env=environment)
            return
        with self.folder.dask_log(who).open("ab") as log:
            self._started[who] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def _ended(self, who: str) -> str | None:
        """How the scheduler, or srun with the workers, has ended; None where it has not."""
        process = self._started[who]
        if process.poll() is None:
            return None
        what = "its scheduler" if who == "scheduler" else "srun, and with it all workers,"
        return f"{what} ended {_how(process.returncode)}{self._said(who)}"

    def _said(self, who: str) -> str:
        """The last that one of them has said of its end, and where there is more."""
        log = self.folder.dask_log(who)
        try:
            lines = [LABEL.sub("", line.strip()) for line in log.read_text(errors="replace").splitlines()]
        except OSError:
            lines = []
        lines = [line for line in lines if line]
        # What Slurm says of an end comes behind why it came.
        told = [line for line in lines if not line.startswith(SLURMS)] or lines
        return f": {told[-1]} ({log} has more)" if told else f", and has said nothing in {log}"

    def _end_command(self, command: subprocess.Popen[bytes], seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            command.wait(seconds)
        if command.poll() is None:
            command.kill()
            command.wait()

    def _end_all(self) -> None:
        """Workers end with their scheduler; what has not in time is killed."""
        running = [process for process in self._started.values() if process.poll() is None]
        for process in running:
            process.terminate()
        until = time.monotonic() + END_SECONDS
        for process in running:
            self._end_command(process, max(0.0, until - time.monotonic()))

    def _note(self, phase: str, reason: str = "", status: int | None = None) -> None:
        try:
            self.folder.write_progress(Progress(phase, self.attempt, reason, status))
        except OSError as error:  # a full disk is no reason to end the work
            self._say(f"cannot write {self.folder.path}: {error.strerror}")

    def _end(self, reason: str, status: int) -> int:
        if reason:
            self._say(f"{'terminated' if status == STOPPED else 'error'}: job {self.job}: {reason}")
        self._note("stopped" if status == STOPPED and self.stopping else "ended", reason, status)
        return status

    @staticmethod
    def _say(line: str) -> None:
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def _how(status: int) -> str:
    return f"by signal {-status}" if status < 0 else f"with exit status {status}"


def _status(process: subprocess.Popen[bytes]) -> int:
    """As a shell reports it."""
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def main(path: str, environment: Mapping[str, str] = os.environ) -> int:
    folder = JobFolder(Path(path))
    attempt = int(environment.get("SLURM_RESTART_COUNT") or 0) + 1
    keeper = Keeper(folder, folder.submitted(), environment["SLURM_JOB_ID"], attempt, environment)

    def asked(number: int, frame: Any) -> None:
        keeper.stop(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, asked)
    return keeper.keep()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
