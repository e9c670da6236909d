"""A real Slurm of two nodes on this machine, for tests: each node has its own hostname, mounts and process ids.

A node can be killed with everything that runs on it, started again, and kept from seeing a folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from conftest import free_port, wait_for

# Seconds until a daemon must answer; a busy machine needs many.
PATIENCE_S = 60.0
# KillWait: seconds between SIGTERM and SIGKILL. Slurm's own timeouts for lost nodes are left at their defaults.
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthInfo=socket={home}/munge.socket
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
KillWait=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=2 State=UNKNOWN
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=n1,n2 MaxTime=5 State=UP
"""
# The node's first process: its end ends every process of the node. It collects orphans, as an init does.
NODE = """
hostname "$1" && mount --bind "$2/hosts" /etc/hosts || exit 1
for folder in "${@:3}"; do mount -t tmpfs none "$folder" || exit 1; done
slurmd -D -N "$1"
exit
"""
UNSHARE = "unshare --mount --pid --uts --fork --kill-child --mount-proc".split()


@dataclass
class Cluster:
    """The running Slurm; every command finds it by the environment variable SLURM_CONF."""

    home: Path
    ports: dict[str, int]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def begin(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a daemon that ends with this process at the latest; what it prints goes to `daemons.log`."""
        tied = ["setpriv", "--pdeathsig", "KILL", *command]
        with open(self.home / "daemons.log", "ab") as log:
            return subprocess.Popen(tied, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def start_node(self, name: str, hidden: tuple[Path | str, ...] = ()) -> None:
        """Start a node, which sees each folder of `hidden` empty; return when it is idle.

        Slurm is told that the node was down, which also ends what it still believes to run there (NODE_FAIL).
        """
        self.said("scontrol", "update", f"nodename={name}", "state=down", "reason=restarted")
        self.nodes[name] = self.begin(*UNSHARE, "bash", "-c", NODE, "node", name, str(self.home), *map(str, hidden))
        self.wait(lambda: not socket.socket().connect_ex(("127.0.0.1", self.ports[name])))
        self.said("scontrol", "update", f"nodename={name}", "state=resume")
        self.wait(lambda: self.said("sinfo", "-h", "-n", name, "-p", "p", "-o", "%T") == "idle")

    def kill_node(self, name: str) -> None:
        """SIGKILL slurmd, its steps and everything below them at once; return when nothing is left of them."""
        node = self.nodes.pop(name)
        inside = psutil.Process(node.pid).children(recursive=True)
        node.send_signal(signal.SIGKILL)
        node.wait()
        self.wait(lambda: not any(_lives(each) for each in inside))

    def processes_of(self, name: str) -> list[psutil.Process]:
        """What runs on a node now, besides its init and its slurmd, with this machine's process ids."""
        _init, *below = psutil.Process(self.nodes[name].pid).children(recursive=True)
        return [each for each in below if _lives(each) and each.name() != "slurmd"]

    def said(self, *command: str) -> str:
        """What one of Slurm's commands prints, without its last newline."""
        return subprocess.run(command, capture_output=True, text=True).stdout.rstrip("\n")

    def queue(self) -> str:
        """The jobs that have not ended: id, state, reason and nodes."""
        return self.said("squeue", "-h", "-o", "%i %T %r %N")

    def wait_until_empty(self) -> None:
        """Return when the queue is empty, and no process of a job is left on any node."""
        wait_for(lambda: not self.queue(), PATIENCE_S)
        for name in self.nodes:
            wait_for(lambda name=name: not self.processes_of(name), PATIENCE_S)

    def wait(self, true: Callable[[], object]) -> None:
        """Return when `true()` is; fail with what the daemons said if it takes too long."""
        try:
            wait_for(true, PATIENCE_S)
        except AssertionError:
            raise AssertionError((self.home / "daemons.log").read_text()[-3000:]) from None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def why_not() -> str:
    """Why no Slurm can be started here, in one sentence; "" if it can."""
    absent = [name for name in "munged slurmctld slurmd sbatch unshare setpriv".split() if not shutil.which(name)]
    if absent:
        return f"No Slurm can be started here: {', '.join(absent)} not found (Debian: slurm-wlm and munge)."
    if os.geteuid():
        return "No Slurm can be started here: its daemons need root."
    if subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode:
        return "No Slurm can be started here: unshare may not make a node's namespaces."
    return ""


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster with the nodes n1 and n2, both idle; at the end every process and file of it is gone."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")))
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH"))]:
            environment.delenv(name)
        environment.setenv("SLURM_CONF", str(home / "slurm.conf"))
        made = Cluster(home, {name: free_port() for name in ("control", "n1", "n2")})
        stack.callback(_end, made)
        _begin(made)
        yield made


@pytest.fixture(scope="module")
def machines() -> Iterator[Cluster]:
    """The cluster of a module's tests."""
    with cluster() as made:
        yield made


def _begin(made: Cluster) -> None:
    home = made.home
    home.chmod(0o755)
    for folder in ("state", "spool-n1", "spool-n2"):
        (home / folder).mkdir()
    (home / "hosts").write_text(f"{Path('/etc/hosts').read_text().rstrip()}\n127.0.0.1 n1 n2\n")
    (home / "slurm.conf").write_text(CONF.format(home=home, host=socket.gethostname(), **made.ports))
    (home / "munge.key").write_bytes(os.urandom(128))
    (home / "munge.key").chmod(0o400)
    options = [f"--{each}-file={home}/munge.{each}" for each in ("key", "pid", "log", "seed")]
    made.daemons.append(made.begin("munged", "--foreground", *options, f"--socket={home}/munge.socket"))
    made.wait((home / "munge.socket").exists)
    made.daemons.append(made.begin("slurmctld", "-D"))
    made.wait(lambda: "UP" in made.said("scontrol", "ping"))
    for name in ("n1", "n2"):
        made.start_node(name)


def _end(made: Cluster) -> None:
    for name in list(made.nodes):
        made.kill_node(name)
    for daemon in reversed(made.daemons):
        daemon.terminate()
        daemon.wait(PATIENCE_S)
