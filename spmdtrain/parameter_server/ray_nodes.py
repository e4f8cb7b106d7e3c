"""The tasks of a TF_CONFIG as nodes of Ray, which has the processes, the messages, the failures.

Ray (https://docs.ray.io) is imported here first, as what it is told in the environment has to be
there by then, and only where parameter servers are used.
"""

import contextlib
import errno
import fcntl
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spmdtrain.cluster.spec import ClusterSpec, Task, from_environment
from spmdtrain.cluster.tf_config import Address
from spmdtrain.distributed import progress
from spmdtrain.errors import ClusterError, ExitCode, UserError
from spmdtrain.files.user_folders import private_folder
from spmdtrain.parameter_server import ray_auth

TASK_PROCESS = "SPMDTRAIN_TASK_PROCESS"  # whose output they write to
_COMES = b"coming "  # before the name of a task whose node starts: a key, too
_OURS, _ENDED = b"spmdtrain", b"ended"  # where Ray keeps it for us: a namespace, and a key in it
_ANSWERS = 2.0  # seconds that the chief's node has to answer
_ENDING = 20.0  # seconds that the node of a killed chief has to end
_LEAST_STORE = 80 << 20  # bytes, of Ray
_FAREWELL, _COMING = 5.0, 20.0  # seconds that tasks have to hear how the training has ended
_CHIEF_GONE = "the chief is gone"
ENDS = {"finished": ExitCode.DONE, "preempted": ExitCode.PREEMPTED}
"""Exit code of a task, by how the job has ended; of other words it is FAILED."""
NODE_DIED = "Ray's processes of this task have died"
# To Ray this means: keep to loopback. It is for laptops whose firewall would ask; here it keeps a
# job of one host from listening on any other address.
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_POLL = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_GONE = 10.0  # seconds without the chief after which a task gives up


def resource(task: Task) -> str:
    """What Ray calls a task's place: what is put there asks for it."""
    return f"{task.type}_{task.index}"


def import_ray(spec: ClusterSpec) -> Any:
    """Imports Ray, bound to the addresses of the cluster, with token authentication.

    Raises:
      UserError: If Ray is missing, or does not authenticate its clients.
    """
    ray_auth.enable()
    if _is_local(spec):
        os.environ[_LOOPBACK_ONLY] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # An actor that asks Ray for no GPU has those of its task all the same.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "strategy parameter_server needs Ray, which is not installed; "
            "pip install 'spmdtrain[ps]'"
        ) from error
    ray_auth.check_enabled()
    return ray


@contextlib.contextmanager
def head(spec: ClusterSpec, timeout: float) -> Iterator[Any]:
    """The chief's node, which the others join; within, this process talks to all of them."""
    ray, chief = import_ray(spec), spec.chief.address
    with _head_beside(spec, timeout):
        # What it would print of a lost process, we say in a line (it has a switch for debuggers).
        ray._private.worker._worker_logs_enabled = False
        with _keeping_handlers(ray):
            ray.init(
                address=_address(chief),
                _node_ip_address=_ip(chief.host),
                logging_level="ERROR",
                log_to_driver=False,
            )
        try:
            yield ray
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _keeping_handlers(ray: Any) -> Iterator[None]:
    """Ray has handlers of signals, which would end this process without saving: not these."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # Nor, for that second, that of SIGTERM.
    sets, ray._private.utils.set_sigterm_handler = (
        ray._private.utils.set_sigterm_handler,
        lambda handler: None,
    )
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = sets
        if threading.current_thread() is threading.main_thread():  # in no other may it, nor Ray
            for number, handler in handlers.items():
                signal.signal(number, handler)


def serve(spec: ClusterSpec, timeout: float) -> str:
    """Be the place of a worker or a parameter server until the chief ends; how it has ended.

    That is `finished`, `preempted`, `failed`, or in words what this task has seen of it. Raises
    `UserError` where the chief has not come after `timeout` seconds.
    """
    import_ray(spec)
    assert spec.task is not None
    task = spec.task
    until = time.monotonic() + timeout
    chief = spec.chief.address
    while not _listens(chief.host, chief.port):
        if time.monotonic() > until:
            raise UserError(
                f"the chief has not come after {timeout:g} s: nothing listens at {chief}, the "
                "address that TF_CONFIG has for it"
            )
        time.sleep(_POLL)
    _leave_signals_to_chief()
    ray_auth.read_token(chief, _is_local(spec))
    client = _client(chief)
    with contextlib.ExitStack() as stack:
        # The chief does not end before this task has heard how: its node may take seconds to start.
        _announce(client, chief, task)
        with _ending_with(chief, lambda: _told(client, task)):
            node = stack.enter_context(_node(spec, task, head=False))
        gone = None
        while True:
            time.sleep(_POLL)
            there = _listens(chief.host, chief.port)
            if there and (how := _told(client, task)):
                return how
            if node.dead_processes():
                return NODE_DIED
            gone = None if there else gone or time.monotonic()
            if gone is not None and time.monotonic() - gone > _GONE:
                return _CHIEF_GONE


def _leave_signals_to_chief() -> None:
    """Ignores the signals that ask a job to stop: the chief saves, and ends all tasks.

    Slurm sends SIGUSR1 to all processes of a task. Ray's processes inherit that it is ignored;
    they need SIGTERM, which ends them.
    """
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@contextlib.contextmanager
def _ending_with(chief: Address, told: Callable[[], str | None]) -> Iterator[None]:
    """Ends this process if the job ends, or the chief is gone, while Ray's node starts.

    Ray would wait for the chief for a minute or two and then raise an unrelated error.

    Args:
      chief: Address of the chief.
      told: Returns how the job has ended, if it has.
    """
    is_there = threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not is_there.wait(_POLL):
            if _listens(chief.host, chief.port):
                last = time.monotonic()
                if (how := told()) is not None:
                    os._exit(ENDS.get(how, ExitCode.FAILED))
            elif time.monotonic() - last > _GONE:
                progress.write_exit_reason(ExitCode.FAILED, f"the job: {_CHIEF_GONE}", own=False)
                print(f"error: {_CHIEF_GONE}", file=sys.stderr, flush=True)
                os._exit(ExitCode.FAILED)  # what Ray has started for this process ends with it

    thread = threading.Thread(target=watch, name="chief", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_there.set()
        thread.join()


def tell_end(ray: Any, how: str, coming: Sequence[Task] = ()) -> None:
    """From the chief: tell all tasks how the training has ended.

    Those that are there have 5 seconds to hear it, and those that are `coming` 20: Ray may be about
    to start their nodes, which would find no chief.
    """
    client = ray._private.worker.global_worker.gcs_client
    client.internal_kv_put(_ENDED, how.encode(), True, _OURS)
    tasks = {
        name.encode()
        for node in ray.nodes()
        for name in node["Resources"]
        if node["Alive"] and name.startswith(("worker_", "ps_"))
    }
    announced = {key.removeprefix(_COMES) for key in client.internal_kv_keys(_COMES, _OURS)} | {
        resource(task).encode() for task in coming
    }
    until = time.monotonic() + (_COMING if announced - tasks else _FAREWELL)
    tasks |= announced
    while tasks - set(client.internal_kv_keys(b"", _OURS)) and time.monotonic() < until:
        time.sleep(_POLL)


def _client(chief: Address) -> Any:
    """Returns a connection to the chief's key-value store, which needs no node."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # which Ray's stubs leave out

    return GcsClient(address=_address(chief))


def _announce(client: Any, chief: Address, task: Task) -> None:
    """Publishes that the node of a task is about to start."""
    from ray.exceptions import AuthenticationError, RayError

    try:
        client.internal_kv_put(_COMES + resource(task).encode(), b"", True, _OURS, _ANSWERS)
    except AuthenticationError as error:
        raise ray_auth.refused(chief) from error
    except RayError:  # the chief's node is ending
        pass


def _told(client: Any, task: Task) -> str | None:
    """How the training has ended, if it has; the chief is told that this task has heard it."""
    from ray.exceptions import RayError

    with contextlib.suppress(RayError):  # the chief's node is ending
        how = client.internal_kv_get(_ENDED, _OURS, _ANSWERS)
        if how is not None:
            client.internal_kv_put(resource(task).encode(), b"", True, _OURS, _ANSWERS)
            return bytes(how).decode()
    return None


@contextlib.contextmanager
def _head_beside(spec: ClusterSpec, timeout: float) -> Iterator[None]:
    """The chief's node in a process of its own, as Ray forks, and JAX has threads in this one."""
    chief = spec.chief.address
    until = time.monotonic() + min(timeout, _ENDING)
    while (why := _not_free(chief)) is not None:  # that of a chief which was killed: it is ending
        if why.errno != errno.EADDRINUSE or time.monotonic() > until:
            raise UserError(
                f"the chief cannot listen at {chief}, the address that TF_CONFIG has for it: "
                f"{os.strerror(why.errno or 0)}"
            )
        time.sleep(_POLL)
    ray_auth.create_token(chief, _is_local(spec))
    command = [sys.executable, "-m", "spmdtrain.parameter_server.ray_nodes"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    try:
        until = time.monotonic() + timeout
        while not _listens(chief.host, chief.port):
            if process.poll() is not None or time.monotonic() > until:
                raise ClusterError(f"Ray's head has not begun to listen at {chief}, see above")
            time.sleep(_POLL)
        yield
    finally:
        process.stdin.close()  # it ends then, in order
        process.wait()


def main() -> None:
    """The chief's node, until the chief closes this one's stdin, or is gone."""
    _leave_signals_to_chief()
    spec = from_environment()
    import_ray(spec)
    with _node(spec, spec.chief, head=True):
        sys.stdin.read()
        ray_auth.remove_token(spec.chief.address)


@contextlib.contextmanager
def _node(spec: ClusterSpec, task: Task, *, head: bool) -> Iterator[Any]:
    """Ray's processes for a task; they end with this one, however it ends."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    chief = spec.chief.address
    if _is_loopback(task.address.host) and not _is_local(spec):
        raise UserError(
            f"{task} is at {task.address.host} by TF_CONFIG, which is {_ip(task.address.host)} "
            "here: no other host finds it there. Give its address, or mend /etc/hosts"
        )
    os.environ[TASK_PROCESS] = str(os.getpid())
    own = [one for one in spec.tasks if one.address.host == task.address.host]
    parameters = RayParams(
        node_ip_address=_ip(task.address.host),
        num_cpus=0,  # else Ray begins as many processes in advance
        num_gpus=0,
        resources={resource(task): 1},
        object_store_memory=_store(len(own)),
        include_dashboard=False,
        no_monitor=True,
    )
    private = private_folder()
    with contextlib.ExitStack() as stack:
        if head or task.address.host != chief.host:
            # Nodes on the host of the chief use its folder. Ray makes it world-writable.
            folder = tempfile.TemporaryDirectory(
                prefix="ray", dir=private, ignore_cleanup_errors=True
            )
            parameters.temp_dir = stack.enter_context(folder)
        if head:
            parameters.gcs_server_port = chief.port
        else:
            parameters.gcs_address = _address(chief)
        with _one_at_a_time():
            node = Node(parameters, head=head, shutdown_at_exit=False, spawn_reaper=True)
        stack.callback(node.kill_all_processes, check_alive=False, allow_graceful=True)
        yield node


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Nodes of one host that start at the same time would take each other's ports."""
    with (private_folder() / "ray.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _not_free(address: Address) -> OSError | None:
    """Why this process cannot listen at an address; None where it can."""
    ip = _ip(address.host)
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((ip, address.port))
        except OSError as error:
            return error
    return None


def _address(of: Address) -> str:
    return f"{_ip(of.host)}:{of.port}"


def _ip(host: str) -> str:
    """Ray knows nodes by their addresses, which TF_CONFIG may give as names."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UserError(f"{host}, which TF_CONFIG names, does not resolve: {error}") from error
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def _store(nodes: int) -> int:
    """Bytes for arrays on their way, of each of so many nodes on a host.

    Ray keeps them in shared memory, of which a container may have little, and refuses to begin with
    more than there is.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else memory
    return max(_LEAST_STORE, int(min(0.3 * memory, 0.8 * shared) / nodes))


def _is_local(spec: ClusterSpec) -> bool:
    try:
        return all(_is_loopback(task.address.host) for task in spec.tasks)
    except UserError:  # a name that does not resolve yet is none of this host
        return False


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(_ip(host)).is_loopback


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2.0):
        return True
    return False


if __name__ == "__main__":
    main()
