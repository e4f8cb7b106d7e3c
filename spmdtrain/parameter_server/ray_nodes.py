"""Ray nodes for the tasks of a TF_CONFIG: their roles, processes and tokens."""

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spmdtrain.cluster import job_token
from spmdtrain.cluster.rendezvous import REPORT_INTERVAL
from spmdtrain.cluster.spec import Address, ClusterSpec, Role, Task, from_environment
from spmdtrain.distributed import initialize, progress
from spmdtrain.distributed.failures import to_stderr
from spmdtrain.errors import ClusterError, ExitCode, OwnExit, UserError
from spmdtrain.parameter_server import ray_nodes
from spmdtrain.record.user_folders import exclusive_file, private_folder

# -- Authentication between the Ray processes of a job ---------------------------------------------
#
# Ray executes pickled code for every client of its ports, as the user of the job, on loopback
# interfaces too. With token authentication its servers refuse clients without the token of the job.

JOB_TOKEN = job_token.TOKEN
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Environment variables of Ray."""


def enable_authentication() -> None:
    """Enables token authentication in this process and its children. Call before importing Ray.

    Raises:
      UserError: If the environment disables it.
    """
    mode = os.environ.setdefault(MODE, "token")
    if mode != "token":
        raise UserError(
            f"{MODE}={mode}: strategy parameter_server requires Ray's token authentication: "
            f"otherwise every local user can execute code in the job; unset {MODE}"
        )


def check_authentication() -> None:
    """Raises `UserError` if the imported Ray does not authenticate its clients."""
    from ray._raylet import (  # type: ignore[attr-defined]
        AuthenticationMode,
        Config,
        get_authentication_mode,
    )

    if get_authentication_mode() != AuthenticationMode.TOKEN:
        Config.initialize("")  # the script had imported Ray, which read the environment then
    if get_authentication_mode() != AuthenticationMode.TOKEN:
        raise UserError(
            "strategy parameter_server requires Ray's token authentication, which this Ray has not "
            f"enabled; set {MODE}=token before the script imports Ray"
        )


def create_token(chief: Address, is_local: bool) -> None:
    """Sets Ray's token in the chief and its children, before they start Ray.

    The token is derived from the token of the job (see `job_token`). Without one it is the token in
    Ray's own environment variables. Without either, if `is_local` (all addresses of the job are
    loopback addresses), the chief creates a token, which the other tasks of this user read from a
    file.

    Raises:
      UserError: If the tasks of the job share no secret.
    """
    if _set_by_environment(chief, is_local):
        return
    file = _file(chief)
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.unlink(missing_ok=True)
    token = secrets.token_hex(32)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as text:
        text.write(token)
    fresh.replace(file)
    os.environ[TOKEN] = token


def read_token(chief: Address, is_local: bool) -> None:
    """Sets Ray's token in another task, once the chief listens; see `create_token`.

    Raises:
      UserError: If this task shares no secret with the chief.
    """
    if _set_by_environment(chief, is_local):
        return
    try:
        os.environ[TOKEN] = _file(chief).read_text()
    except OSError as error:
        raise UserError(
            f"{error.filename}, the token of the job whose chief is at {chief}, cannot be read: "
            f"{error.strerror}. Another program listens there, or another user has started it; "
            f"set {JOB_TOKEN} to the same secret in all tasks of the job"
        ) from error


def remove_token(chief: Address) -> None:
    """Removes the file of `create_token`, if it wrote one."""
    with suppress(FileNotFoundError):
        _file(chief).unlink()


def refused_token(chief: Address) -> UserError:
    """Returns the error of a task whose token the chief does not accept."""
    return UserError(
        f"the chief at {chief} refuses the token of this task: {JOB_TOKEN} must be the same in all "
        "tasks of a job"
    )


def _set_by_environment(chief: Address, is_local: bool) -> bool:
    """Sets the token if the environment has one; if not (False), it is in a file of this user.

    Raises:
      UserError: If the environment has none, and the job is not on loopback addresses alone.
    """
    if secret := job_token.read(warn=lambda text: print(text, file=sys.stderr)):
        # Each chief has its own token, so a program that takes the port of one learns no other.
        os.environ[TOKEN] = hmac.new(secret, f"ray {chief}".encode(), hashlib.sha256).hexdigest()
    if os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH):
        return True
    if is_local:
        return False
    raise UserError(
        f"the tasks of the job at {chief} share no secret, and Ray executes the code of every "
        f"program that reaches its ports: set {JOB_TOKEN} to the same secret in all tasks "
        "(openssl rand -hex 32 prints one)"
    )


def _file(chief: Address) -> Path:
    return private_folder() / f"ray-{quote(chief.host, safe='')}-{chief.port}.token"


# -- Roles of the processes of a job with parameter servers ----------------------------------------


def run_task_role(timeout: float) -> None:
    """Takes the role that TF_CONFIG gives this process in a job of parameter servers.

    The chief, or worker 0 of a cluster without one, returns. Workers and servers wait at most
    `timeout` seconds for it, serve it and exit.

    Raises:
      UserError: If the cluster lacks tasks, or this is its evaluator.
      OwnExit: In a worker or a server, when the job has ended.
    """
    spec = from_environment()
    if spec.role is Role.EVALUATE:
        raise UserError(
            f"TF_CONFIG makes this process {spec.name}, which does not train: only Trainer.fit and "
            "python -m spmdtrain.run evaluate there"
        )
    if missing := spec.why_no_servers:
        given = f" (this one has {missing})" if spec.jobs else ""
        raise UserError(
            f"parameter servers need a TF_CONFIG with a chief, workers and ps tasks{given}: start "
            "one with python -m spmdtrain.launch --processes 3 --ps 2 -- ..."
        )
    initialize.set_single_process()
    if spec.is_chief:
        return
    how = ray_nodes.serve(spec, timeout)
    if how not in ray_nodes.ENDS:
        progress.write_exit_reason(
            ExitCode.FAILED, f"the job: {how}", own=how == ray_nodes.NODE_DIED
        )
    raise OwnExit(ray_nodes.ENDS.get(how, ExitCode.FAILED))


def run_if_worker_or_server(timeout: float) -> None:
    """Takes the role of a worker or a parameter server, if this process is one, and then exits.

    Call before devices are used, because the actors of the task use them. For `timeout` and errors
    see `run_task_role`.
    """
    spec = from_environment()
    if spec.task_type in ("worker", "ps") and not spec.is_chief:
        run_task_role(timeout)


# -- Ray nodes for the tasks of a TF_CONFIG --------------------------------------------------------
#
# Ray (https://docs.ray.io) manages processes, messages and failures of a job with parameter
# servers. It is imported here, only if parameter servers are used, after its environment variables
# are set.

TASK_PROCESS = "SPMDTRAIN_TASK_PROCESS"  # process id of the task whose output actors write to
_STARTING = b"coming "  # prefix of the keys of tasks whose nodes are starting
_NAMESPACE, _END_KEY = b"spmdtrain", b"ended"  # in Ray's key-value store
_ANSWER_TIMEOUT = 2.0  # seconds in which the chief's node has to answer
_PORT_TIMEOUT = 20.0  # seconds to wait for the node of a killed chief to release its port
_MIN_STORE = 80 << 20  # bytes, the minimum of Ray
_END_TIMEOUT, _STARTING_END_TIMEOUT = 5.0, 20.0  # seconds in which tasks read how the job ended
_CHIEF_GONE = "the chief is gone"
ENDS = {"finished": ExitCode.DONE, "preempted": ExitCode.PREEMPTED}
"""Exit code of a task by how the job has ended; FAILED for all other texts."""
NODE_DIED = "Ray's processes of this task have died"
# Makes Ray listen on loopback addresses only. Its purpose is to avoid prompts of the firewalls of
# laptops; here it keeps a job on one host from listening on other addresses.
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_POLL = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NODE_TIMEOUT = 30.0  # seconds for the node of the chief to end
_CHIEF_TIMEOUT = 10.0  # seconds without the chief after which a task ends


def resource(task: Task) -> str:
    """Returns the name of a task's custom resource, by which actors are placed on its node."""
    return f"{task.type}_{task.index}"


def import_ray(spec: ClusterSpec) -> Any:
    """Returns the module `ray`, bound to the addresses of the cluster, with token authentication.

    Raises:
      UserError: If Ray is missing, or does not authenticate its clients.
    """
    enable_authentication()
    if _is_local(spec):
        os.environ[_LOOPBACK_ONLY] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Actors request no GPU from Ray, and still see those of their task.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray adds 15 to the niceness of actors. On a host with other busy processes they would get
    # almost no CPU time, and the job would wait for a parameter server for minutes.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "strategy parameter_server requires Ray, which is not installed: "
            "pip install 'spmdtrain[ps]'"
        ) from error
    if _is_local(spec):  # the script may have imported Ray, which read the environment then
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False
    check_authentication()
    return ray


@contextlib.contextmanager
def head(spec: ClusterSpec, timeout: float) -> Iterator[Any]:
    """Starts the chief's node, which the other tasks join, and connects this process to it.

    Waits at most `timeout` seconds for the node. Yields the module `ray`.

    Raises:
      UserError: If Ray is missing or unauthenticated, or the chief's address cannot be used.
      ClusterError: If Ray does not start.
    """
    ray, chief = import_ray(spec), spec.chief.address
    with _head_process(spec, timeout):
        # Ray would print paragraphs about lost processes, for which this package prints a line. The
        # switch exists for debuggers.
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
    """Keeps the signal handlers, because Ray's would end this process without saving."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # The handler of SIGTERM is not replaced during the block either.
    original, ray._private.utils.set_sigterm_handler = (
        ray._private.utils.set_sigterm_handler,
        lambda handler: None,
    )
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = original
        if threading.current_thread() is threading.main_thread():  # no other thread may
            for number, handler in handlers.items():
                signal.signal(number, handler)


def serve(spec: ClusterSpec, timeout: float) -> str:
    """Runs the node of a worker or a parameter server until the job ends.

    Returns:
      How the job has ended: `finished`, `preempted` or `failed` as the chief reports it, or the
      reason for which this task has left it.

    Raises:
      UserError: If the chief does not start within `timeout` seconds.
    """
    import_ray(spec)
    task = spec.own_task
    began = time.monotonic()
    next_report = began + REPORT_INTERVAL
    chief = spec.chief.address
    while not _listens(chief.host, chief.port):
        if (now := time.monotonic()) > next_report:
            waited = f"for {now - began:.0f} s, at most {timeout:g}"
            to_stderr(f"{task} waits for the chief at {chief} ({waited}): nothing listens there")
            next_report = now + REPORT_INTERVAL
        if now > began + timeout:
            raise UserError(
                f"the chief has not started after {timeout:g} s: nothing listens at {chief}, its "
                "address in TF_CONFIG"
            )
        time.sleep(_POLL)
    _leave_signals_to_chief()
    read_token(chief, _is_local(spec))
    client = _client(chief)
    with contextlib.ExitStack() as stack:
        # The chief waits until this task has read how the job ended. The node may take seconds to
        # start, so the task is announced before.
        _announce(client, chief, task)
        with _chief_watcher(chief, lambda: _read_end(client, task)):
            node = stack.enter_context(_node(spec, task, head=False))
        absent_since = None
        while True:
            time.sleep(_POLL)
            is_listening = _listens(chief.host, chief.port)
            if is_listening and (how := _read_end(client, task)):
                return how
            if node.dead_processes():
                return NODE_DIED
            absent_since = None if is_listening else absent_since or time.monotonic()
            if absent_since is not None and time.monotonic() - absent_since > _CHIEF_TIMEOUT:
                return _CHIEF_GONE


def _leave_signals_to_chief() -> None:
    """Ignores the signals that stop a job, because the chief saves and ends all tasks.

    Slurm sends SIGUSR1 to all processes of a task, so Ray's processes inherit that it is ignored.
    They do not ignore SIGTERM, which ends them.
    """
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@contextlib.contextmanager
def _chief_watcher(chief: Address, read_end: Callable[[], str | None]) -> Iterator[None]:
    """Ends this process if the job ends, or the chief is lost, while Ray's node starts.

    Ray would wait for the chief for a minute or two and then raise an unrelated error.
    """
    has_started = threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not has_started.wait(_POLL):
            if _listens(chief.host, chief.port):
                last = time.monotonic()
                if (how := read_end()) is not None:
                    os._exit(ENDS.get(how, ExitCode.FAILED))
            elif time.monotonic() - last > _CHIEF_TIMEOUT:
                progress.write_exit_reason(ExitCode.FAILED, f"the job: {_CHIEF_GONE}", own=False)
                print(f"error: {_CHIEF_GONE}", file=sys.stderr, flush=True)
                os._exit(ExitCode.FAILED)  # Ray's processes of this task end with it

    thread = threading.Thread(target=watch, name="chief", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_started.set()
        thread.join(_CHIEF_TIMEOUT)


def publish_end(ray: Any, how: str, coming: Sequence[Task] = ()) -> None:
    """Publishes how the job has ended, and waits until all tasks have read it.

    The chief calls it, with a key of `ENDS` or `failed` as `how`. It waits 5 seconds for tasks with
    a node, and 20 if nodes may be starting, which would otherwise find no chief. The tasks of
    `coming` may not have started yet.
    """
    client = ray._private.worker.global_worker.gcs_client
    client.internal_kv_put(_END_KEY, how.encode(), True, _NAMESPACE)
    tasks = {
        name.encode()
        for node in ray.nodes()
        for name in node["Resources"]
        if node["Alive"] and name.startswith(("worker_", "ps_"))
    }
    announced = {
        key.removeprefix(_STARTING) for key in client.internal_kv_keys(_STARTING, _NAMESPACE)
    } | {resource(task).encode() for task in coming}
    deadline = time.monotonic() + (_STARTING_END_TIMEOUT if announced - tasks else _END_TIMEOUT)
    tasks |= announced
    while tasks - set(client.internal_kv_keys(b"", _NAMESPACE)) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _client(chief: Address) -> Any:
    """Returns a connection to the chief's key-value store, which needs no node."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # missing in Ray's stubs

    return GcsClient(address=_address(chief))


def _announce(client: Any, chief: Address, task: Task) -> None:
    """Publishes that the node of a task is about to start."""
    from ray.exceptions import AuthenticationError, RayError

    try:
        client.internal_kv_put(
            _STARTING + resource(task).encode(), b"", True, _NAMESPACE, _ANSWER_TIMEOUT
        )
    except AuthenticationError as error:
        raise refused_token(chief) from error
    except RayError:  # the chief's node is ending
        pass


def _read_end(client: Any, task: Task) -> str | None:
    """Returns how the job has ended, if it has, and confirms to the chief that it was read."""
    from ray.exceptions import RayError

    with contextlib.suppress(RayError):  # the chief's node is ending
        how = client.internal_kv_get(_END_KEY, _NAMESPACE, _ANSWER_TIMEOUT)
        if how is not None:
            client.internal_kv_put(resource(task).encode(), b"", True, _NAMESPACE, _ANSWER_TIMEOUT)
            return bytes(how).decode()
    return None


@contextlib.contextmanager
def _head_process(spec: ClusterSpec, timeout: float) -> Iterator[None]:
    """Runs the chief's node in a process without JAX, because Ray forks and JAX has threads."""
    chief = spec.chief.address
    deadline = time.monotonic() + min(timeout, _PORT_TIMEOUT)
    while (error := _bind_error(chief)) is not None:  # the node of a killed chief may be ending
        if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
            raise UserError(
                f"the chief cannot listen at {chief}, its address in TF_CONFIG: "
                f"{os.strerror(error.errno or 0)}"
            )
        time.sleep(_POLL)
    create_token(chief, _is_local(spec))
    command = [sys.executable, "-m", "spmdtrain.parameter_server.ray_nodes"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    try:
        deadline = time.monotonic() + timeout
        while not _listens(chief.host, chief.port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(f"Ray's head node does not listen at {chief}; see above")
            time.sleep(_POLL)
        yield
    finally:
        process.stdin.close()  # upon which it ends
        try:
            process.wait(_NODE_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    """Runs the chief's node until the chief closes the standard input of this process, or ends."""
    _leave_signals_to_chief()
    spec = from_environment()
    import_ray(spec)
    with _node(spec, spec.chief, head=True):
        sys.stdin.read()
        remove_token(spec.chief.address)


@contextlib.contextmanager
def _node(spec: ClusterSpec, task: Task, *, head: bool) -> Iterator[Any]:
    """Starts Ray's processes of a task, which end with this process in any case."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    chief = spec.chief.address
    if _is_loopback(task.address.host) and not _is_local(spec):
        raise UserError(
            f"TF_CONFIG has {task} at {task.address.host}, which resolves to "
            f"{_ip(task.address.host)} on this host and cannot be reached from others. Use its "
            "network address, or correct /etc/hosts"
        )
    os.environ[TASK_PROCESS] = str(os.getpid())
    same_host = [other for other in spec.tasks if other.address.host == task.address.host]
    parameters = RayParams(
        node_ip_address=_ip(task.address.host),
        num_cpus=0,  # otherwise Ray starts as many processes in advance
        num_gpus=0,
        resources={resource(task): 1},
        object_store_memory=_store(len(same_host)),
        include_dashboard=False,
        # Actors write to the output of their task. Ray annotates this boolean as a string.
        include_log_monitor=False,  # type: ignore[arg-type]
        no_monitor=True,
    )
    private = private_folder()
    with contextlib.ExitStack() as stack:
        if head or task.address.host != chief.host:
            # Nodes on the chief's host use its folder. Ray makes the folder world-writable.
            folder = tempfile.TemporaryDirectory(
                prefix="ray", dir=private, ignore_cleanup_errors=True
            )
            parameters.temp_dir = stack.enter_context(folder)
        if head:
            parameters.gcs_server_port = chief.port
        else:
            parameters.gcs_address = _address(chief)
        with _exclusive_start():
            node = Node(parameters, head=head, shutdown_at_exit=False, spawn_reaper=True)
        stack.callback(node.kill_all_processes, check_alive=False, allow_graceful=True)
        yield node


@contextlib.contextmanager
def _exclusive_start() -> Iterator[None]:
    """Serializes the starts of nodes on a host, which would otherwise take each other's ports."""
    with exclusive_file("ray.lock"):
        yield


def _bind_error(address: Address) -> OSError | None:
    """Returns the error of listening at an address; None if this process can."""
    ip = _ip(address.host)
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((ip, address.port))
        except OSError as error:
            return error
    return None


def _address(address: Address) -> str:
    return f"{_ip(address.host)}:{address.port}"


def _ip(host: str) -> str:
    """Returns the IP address of a host, because Ray identifies nodes by it."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UserError(f"{host}, a host in TF_CONFIG, cannot be resolved: {error}") from error
    return str(min(infos, key=lambda info: info[0] != socket.AF_INET)[4][0])


def _store(nodes: int) -> int:
    """Returns the bytes of the object store of a node, if this host has `nodes` of them.

    The store is in shared memory, which may be small in a container. Ray refuses to start if the
    store exceeds it.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else memory
    return max(_MIN_STORE, int(min(0.3 * memory, 0.8 * shared) / nodes))


def _is_local(spec: ClusterSpec) -> bool:
    try:
        return all(_is_loopback(task.address.host) for task in spec.tasks)
    except UserError:  # a name that cannot be resolved yet is not this host
        return False


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(_ip(host)).is_loopback


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2.0):
        return True
    return False


if __name__ == "__main__":
    main()
