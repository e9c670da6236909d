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
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

NODES = ("n1", "n2")
# Seconds until a daemon must answer; a busy machine needs many.
PATIENCE_S = 60.0
# KillWait: seconds between SIGTERM and SIGKILL. Slurm's own timeouts for lost nodes are left at their defaults.
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=n1,n2 MaxTime=5 State=UP
"""
# The node's first process: its end ends every process of the node. It collects orphans, as an init does.
NODE = """
hostname "$1" && mount --bind "$2/hosts" /etc/hosts && shift 2 || exit 1
for folder in "${@:2}"; do mount -t tmpfs none "$folder" || exit 1; done
slurmd -D -N "$1"
exit
"""
UNSHARE = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]


@dataclass
class Cluster:
    """The running Slurm; every command finds it by the environment variable SLURM_CONF."""

    home: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def begin(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a daemon in the foreground of its own session; what it prints goes to `daemons.log`."""
        with open(self.home / "daemons.log", "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.home
            )

    def start_node(self, name: str, hidden: tuple[Path | str, ...] = ()) -> None:
        """Start a node, which sees each folder of `hidden` empty; return when it is idle.

        Slurm is told that the node was down, which also ends what it still believes to run there (NODE_FAIL).
        """
        folders = [str(each) for each in hidden]
        self.said("scontrol", "update", f"nodename={name}", "state=down", "reason=restarted")
        self.nodes[name] = self.begin(*UNSHARE, "bash", "-c", NODE, "node", name, str(self.home), name, *folders)
        until = time.monotonic() + PATIENCE_S
        while socket.socket().connect_ex(("127.0.0.1", self.ports[name])):
            assert self.nodes[name].poll() is None and time.monotonic() < until, self.logs()
            time.sleep(0.02)
        self.said("scontrol", "update", f"nodename={name}", "state=resume")
        self.wait_until_idle(name)

    def kill_node(self, name: str) -> float:
        """SIGKILL slurmd, its steps and all below, at once; the time of `time.time()` when nothing is left."""
        node = self.nodes.pop(name)
        inside = psutil.Process(node.pid).children(recursive=True)
        node.send_signal(signal.SIGKILL)
        node.wait()
        until = time.monotonic() + PATIENCE_S
        while any(each.is_running() and each.status() != "zombie" for each in inside):
            assert time.monotonic() < until, f"{name}: {inside}"
            time.sleep(0.01)
        return time.time()

    def processes_of(self, name: str) -> list[psutil.Process]:
        """What runs on a node now, besides its init and its slurmd."""
        own = psutil.Process(self.nodes[name].pid)
        return [each for each in own.children(recursive=True) if each.name() not in ("bash", "slurmd")]

    def said(self, *command: str) -> str:
        """What one of Slurm's commands prints, without its last newline."""
        return subprocess.run(command, capture_output=True, text=True).stdout.rstrip("\n")

    def queue(self) -> str:
        """The jobs that have not ended."""
        return self.said("squeue", "-h", "-o", "%i %T %r %N")

    def wait_until_idle(self, *names: str) -> None:
        """Return when Slurm says that these nodes (all without names) run nothing and can be used."""
        until = time.monotonic() + PATIENCE_S
        wanted = names or NODES
        while (seen := self.said("sinfo", "-h", "-N", "-n", ",".join(wanted), "-p", "p", "-o", "%T")).split() != [
            "idle"
        ] * len(wanted):
            assert time.monotonic() < until, f"{wanted}: {seen}\n{self.logs()}"
            time.sleep(0.05)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.home.glob("*.log")))


def why_not() -> str:
    """Why no Slurm can be started here, in one sentence; "" if it can."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "unshare") if not shutil.which(name)]
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
        home.chmod(0o755)
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH"))]:
            environment.delenv(name)
        environment.setenv("SLURM_CONF", str(home / "slurm.conf"))
        made = Cluster(home)
        stack.callback(_end, made)
        _begin(made)
        yield made


def _begin(made: Cluster) -> None:
    home, host = made.home, socket.gethostname()
    for folder in ("munge", "state", *(f"spool-{name}" for name in NODES)):
        (home / folder).mkdir(mode=0o755)
    (home / "hosts").write_text(f"{Path('/etc/hosts').read_text().rstrip()}\n127.0.0.1 {' '.join(NODES)}\n")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in sockets]
    made.ports = dict(zip(NODES, ports[1:], strict=True))
    for each in sockets:
        each.close()
    (home / "slurm.conf").write_text(CONF.format(home=home, host=host, ports=ports))
    key = home / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={home}/munge/{name}" for option, name in names.items()]
    made.daemons.append(made.begin("munged", "--foreground", *options))
    until = time.monotonic() + PATIENCE_S
    while not (home / "munge" / "socket").exists():
        assert made.daemons[0].poll() is None and time.monotonic() < until, made.logs()
        time.sleep(0.02)
    made.daemons.append(made.begin("slurmctld", "-D"))
    while "UP" not in made.said("scontrol", "ping"):
        assert made.daemons[1].poll() is None and time.monotonic() < until, made.logs()
        time.sleep(0.05)
    for name in NODES:
        made.nodes[name] = made.begin(*UNSHARE, "bash", "-c", NODE, "node", name, str(home), name)
    made.wait_until_idle()


def _end(made: Cluster) -> None:
    for name in list(made.nodes):
        made.kill_node(name)
    for daemon in reversed(made.daemons):
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
