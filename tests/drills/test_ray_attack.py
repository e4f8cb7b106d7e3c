"""Attacks on the ports of a Ray cluster by another user of the machine."""

import contextlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from helpers import BOUND
from other_user import UID, as_stranger

from spmdtrain.parameter_server.ray_nodes import JOB_TOKEN, MODE, TOKEN, TOKEN_PATH


@pytest.fixture(autouse=True)
def environment(tmp_path: Path) -> Iterator[None]:
    """Without tokens, and with a folder for temporary files of its own."""
    with (
        mock.patch.dict(os.environ),
        mock.patch("tempfile.tempdir", str(tmp_path)),
    ):
        for name in (JOB_TOKEN, MODE, TOKEN, TOKEN_PATH):
            os.environ.pop(name, None)
        yield


# Joins the Ray cluster at an address and has code run on the node of its chief.
ATTACK = """
import os
import shutil
import sys
import tempfile

import ray
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import GcsClient
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

address = sys.argv[1]
try:
    GcsClient(address=address).internal_kv_put(b"foreign", b"x", True, b"spmdtrain", 3.0)
except ray.exceptions.AuthenticationError:
    sys.exit("refused")
folder = tempfile.mkdtemp()
own = Node(
    RayParams(
        node_ip_address="127.0.0.1",
        gcs_address=address,
        num_cpus=0,
        temp_dir=folder,
        include_dashboard=False,
        object_store_memory=80 << 20,
    ),
    head=False,
)
ray.init(address=address, _temp_dir=folder, log_to_driver=False, logging_level="ERROR")
(victim,) = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != own.node_id]
there = NodeAffinitySchedulingStrategy(victim, soft=False)
run = ray.remote(lambda: os.getuid()).options(num_cpus=0, scheduling_strategy=there)
print("ran as", ray.get(run.remote(), timeout=400), "from", os.getuid())
own.kill_all_processes(check_alive=False, allow_graceful=True)
shutil.rmtree(folder, ignore_errors=True)
"""

# Prints the address of a Ray cluster, and ends with its standard input.
UNPROTECTED = """
import os
import sys
import ray

ray.init(num_cpus=0, include_dashboard=False, logging_level="ERROR", _node_ip_address="127.0.0.1")
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
os._exit(0)  # ray.shutdown waits for the node that has joined; its processes end with this one
"""

PROTECTED = """
import os
import sys
from spmdtrain.parameter_server import ray_nodes
from spmdtrain.cluster.spec import from_environment
from spmdtrain.launch.task_env import tf_configs

os.environ["TF_CONFIG"] = tf_configs(["chief", "worker 0", "ps 0"])["chief"]
spec = from_environment()
with ray_nodes.head(spec, 60.0) as ray:
    class Actor:
        def ready(self):
            pass
    actor = ray.remote(Actor).options(num_cpus=0).remote()
    ray.get(actor.ready.remote())
    print(spec.chief.address, flush=True)
    sys.stdin.read()
"""

# A method of each of Ray's services that takes an empty message, and runs or changes something.
METHODS = (
    "/ray.rpc.InternalKVGcsService/InternalKVPut",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.CoreWorkerService/PushTask",
)


@contextlib.contextmanager
def victim(code: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process with a Ray cluster, and the words that it prints."""
    own = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | own | {"TMPDIR": str(folder), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process, process.stdout.readline().split()
    finally:
        process.stdin.close()
        process.wait(BOUND)
        process.stdout.close()


def attack(address: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"HOME": "/", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.run(
        as_stranger([sys.executable, "-c", ATTACK, address]),
        env={"PATH": os.environ["PATH"]} | own | environment,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def ports_of(process: int) -> set[int]:
    """Ports at which a process and its descendants listen."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    family, inodes = {process}, set()
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    for pid in family:
        with contextlib.suppress(OSError):  # it has ended
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # it has closed it
                    inodes.add(os.readlink(file))
    rows = [
        line.split()
        for file in ("tcp", "tcp6")
        for line in Path("/proc/net", file).read_text().splitlines()[1:]
    ]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return {int(row[1].rpartition(":")[2], 16) for row in listening}


def answer(port: int, method: str) -> str:
    """Returns the gRPC status of a call without a token, or the HTTP status of a port of that."""
    import grpc  # type: ignore[import-untyped]

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=20)
        except grpc.RpcError as error:  # a server of HTTP answers so, or not at all
            codes = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if error.code() not in codes:
                return str(error.code().name)
        else:
            return "OK"
    ask = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}"]
    return subprocess.check_output([*ask, f"http://127.0.0.1:{port}/"], text=True)


@pytest.mark.usefixtures("root")
def test_another_user_runs_code_in_a_cluster_without_a_token_and_not_in_a_job() -> None:
    pytest.importorskip("ray")
    pytest.importorskip("grpc")
    folder = Path("/tmp")  # a socket's path has at most 107 bytes
    os.environ[MODE] = "disabled"
    with victim(UNPROTECTED, folder) as (_, (address,)):
        found = attack(address)
        assert found.stdout == f"ran as {os.getuid()} from {UID}\n", found.stderr
    del os.environ[MODE]
    with victim(PROTECTED, folder) as (process, (address,)):
        for environment in ({}, {MODE: "token", TOKEN: "guess"}):
            found = attack(address, **environment)
            assert (found.returncode, found.stdout) == (1, ""), found.stdout
            assert found.stderr.splitlines()[-1] == "refused"
        ports = ports_of(process.pid)
        assert int(address.partition(":")[2]) in ports and len(ports) >= 6
        answers = {port: {answer(port, method) for method in METHODS} for port in ports}
        unknown = {"UNAUTHENTICATED", "UNIMPLEMENTED"}
        assert all(found in ({"401"}, unknown) for found in answers.values()), answers
        private = Path("/tmp", f"spmdtrain-{os.getuid()}")
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        listed = subprocess.check_output(["ss", "-lxH"], text=True)
        sockets = re.findall(rf"{private}/ray\S+/sockets/(\w+)", listed)
        assert {"raylet", "plasma_store"} <= set(sockets)
