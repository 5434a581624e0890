"""
The torchrun launcher over two nodes: two network namespaces with host names of their own.

Each has one end of a virtual cable and its own /etc/hosts, so that nothing but the network joins
them, as on two machines with a shared file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsdp_migrate.cli import app
from fsdp_migrate.errors import Incomplete, UsageError
from fsdp_migrate.verify.experiment import launch
from fsdp_migrate.verify.follow import follow
from fsdp_migrate.verify.launchers.torchrun import Torchrun
from fsdp_migrate.verify.traces import read_trace
from fsdp_migrate.verify.trial import Job, Trace, Trial

SCRIPTS = Path(__file__).parent / "scripts"
PORT = 29431  # both namespaces are new: every port is free
LAUNCH = """
import sys
from pathlib import Path
from fsdp_migrate.verify.follow import follow
from fsdp_migrate.verify.launchers.torchrun import Torchrun
from fsdp_migrate.verify.trial import Job
Torchrun(sys.argv[2]).run(Job.read(Path(sys.argv[1])))
"""


@dataclass(frozen=True)
class Node:
    name: str  # of the namespace and of the host
    cable: str
    address: str

    def command(self, *command: str) -> list[str]:
        """Run in this node: its network, its /etc/hosts, and its own host name."""
        rename = f'hostname {self.name} && exec "$@"'
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "bash", "-c", rename]
        return [*inside, "bash", *command]


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if absent := [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(absent)}")
    ours = f"fm{os.getpid() % 100000}"
    pair = (Node(f"{ours}a", f"{ours}x", "10.77.0.1"), Node(f"{ours}b", f"{ours}y", "10.77.0.2"))
    with contextlib.ExitStack() as removals:
        for node in pair:
            _ip("netns", "add", node.name)
            removals.callback(_ip, "netns", "delete", node.name)
            own = Path("/etc/netns") / node.name
            own.mkdir(parents=True)
            removals.callback(shutil.rmtree, own)
            known = "".join(f"{each.address} {each.name}\n" for each in pair)
            (own / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        ends = [part for node in pair for part in (node.cable, node.name)]
        _ip(
            "link",
            "add",
            ends[0],
            "netns",
            ends[1],
            "type",
            "veth",
            "peer",
            ends[2],
            "netns",
            ends[3],
        )
        for node in pair:
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", node.cable)
            for device in ("lo", node.cable):
                _ip("-n", node.name, "link", "set", device, "up")
        yield pair


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _on_both(nodes: tuple[Node, Node], *command: str, timeout: float) -> list[tuple[int, str]]:
    """The same command on both nodes at once: exit codes and what was said."""
    running = [
        subprocess.Popen(
            node.command(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for node in nodes
    ]
    try:
        said = [process.communicate(timeout=timeout) for process in running]
    finally:
        for process in running:
            process.terminate()  # not killed: it would leave its agent behind
            process.wait()
    return [(p.returncode, out + err) for p, (out, err) in zip(running, said, strict=True)]


def losses(trace: Trace) -> list[list[tuple[float, ...]]]:
    return [[step.losses for step in rank.steps] for rank in trace.ranks]


@pytest.mark.root
def test_two_nodes_train_what_one_node_trains(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """One rank on each of two nodes, and the losses are bit for bit those of two on one node."""
    trial = Trial("exact", SCRIPTS / "fsdp1.py", steps=3, exact=True)
    one = Job(tmp_path / "one", (trial,), nproc_per_node=2, timeout=120)
    two = Job(tmp_path / "two", (trial,), nproc_per_node=1, nnodes=2, timeout=120)
    expected = launch("one", one, Torchrun())["exact"]
    two.folder.mkdir()
    two.write()
    command = (sys.executable, "-c", LAUNCH, str(two.file), f"{nodes[0].address}:{PORT}")

    ended = _on_both(nodes, *command, timeout=240)

    assert [code for code, _ in ended] == [0, 0], ended
    found = read_trace(two, trial)
    assert found.failures == ()
    assert losses(found) == losses(expected)
    assert len(losses(found)[1]) == 3


@pytest.mark.root
def test_verify_over_two_nodes_passes(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """The same verify command on both nodes: the endpoint's judges, and both give its verdict."""
    ended = _on_both(
        nodes,
        *(sys.executable, "-m", "fsdp_migrate", "verify", str(SCRIPTS / "fsdp1.py")),
        *("--after", str(SCRIPTS / "fsdp2.py"), "--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-endpoint", f"{nodes[0].address}:{PORT}", "--out", str(tmp_path / "out")),
        *("--steps", "2", "--modes", "exact"),
        timeout=400,
    )

    assert [code for code, _ in ended] == [0, 0], ended
    assert all("PASS (bitwise)" in said for _, said in ended)
    assert ["another node leads" in said for _, said in ended] == [False, True]
    assert json.loads((tmp_path / "out" / "result.json").read_text())


@pytest.mark.parametrize(
    ("endpoint", "here"),
    [
        ("127.0.0.1:29400", True),
        ("localhost:29400", True),
        ("[::1]:29400", True),
        ("192.0.2.1:29400", False),  # set aside for documentation: nobody's
    ],
)
def test_the_node_of_the_endpoint_leads(endpoint: str, here: bool) -> None:
    """An address is this machine's if a socket can be bound to it."""
    assert Torchrun(endpoint).leads is here


@pytest.mark.parametrize(
    "endpoint", ["10.0.0.1", ":29400", "10.0.0.1:port", "no.such.host.invalid:1"]
)
def test_an_endpoint_that_names_no_address_is_refused(endpoint: str) -> None:
    """At once, instead of a rendezvous that nobody comes to."""
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        _ = Torchrun(endpoint).leads


def test_a_leader_that_never_comes_is_told(tmp_path: Path) -> None:
    """With the file that was waited for."""
    with pytest.raises(Incomplete, match=r"before/job\.json did not come within 0\.1 s"):
        follow(tmp_path, Torchrun("192.0.2.1:29400"), 0.1)


def test_several_nodes_need_an_endpoint(tmp_path: Path) -> None:
    """Otherwise every node would wait for itself."""
    done = CliRunner().invoke(
        app,
        ["verify", str(SCRIPTS / "fsdp1.py"), "--nnodes", "2", "--out", str(tmp_path / "out")],
    )

    assert done.exit_code == 2
    assert "--rdzv-endpoint HOST:PORT" in done.stderr
