"""A Ray cluster: joined or started, with its token, and how many actors it has room for.

Ray's processes listen on all interfaces of a machine, and whoever reaches them without a token runs
code there. So a cluster without one, and one at a public address, is warned of in a line.
"""

import atexit
import contextlib
import importlib.metadata
import importlib.util
import ipaddress
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asrkit.shapes import expect
from asrkit.transcribe.endings import class_and_message

LOCAL = "local"  # the address of a cluster that is started here and ends with the run
OLDEST = (2, 59)  # of Ray: the first whose local clusters ask for a token by themselves
NEEDED = ("pyarrow", "pandas")  # by Ray Data, which plain Ray does not install
INSTEAD = "or pass --part K/N, which needs no Ray"
ANSWER_S = 5.0  # until an address is given up
FREE_S = 10.0  # actors of a run that was killed leave within seconds
MOST_LETTERS = 24  # of the folder for temporary files: a socket's path has 107 in all
STORE_BYTES = 100 * 2**20  # for names of shards this is plenty
OPEN = (  # a program that ends with 0 where a cluster answers those who have no token
    "import sys; from ray._raylet import GcsClient; "
    "GcsClient(address=sys.argv[1]).check_alive([], timeout=5)"
)


class ClusterLostError(RuntimeError):
    """The head of a cluster that was joined does not answer any more."""


def expect_ray() -> None:
    """ValueError unless Ray Data is installed, and new enough; nothing of it is imported."""
    found = "none"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.version("ray")
    number = re.match(r"(\d+)\.(\d+)", found)
    new = number is not None and (int(number[1]), int(number[2])) >= OLDEST
    wanted = "Ray " + ".".join(map(str, OLDEST)) + " or newer"
    remedy = f"pip install 'asrkit[scale]', {INSTEAD}."
    expect(new, "on", wanted, found, remedy)
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    expect(not absent, "on", "Ray Data", f"Ray without {' and '.join(absent)}", remedy)


def address_of(given: str | None) -> str:
    """The address of a cluster: `given`, or else $RAY_ADDRESS.

    Args:
        given: HOST:PORT, "local", or None.

    Raises:
        ValueError: There is none, or it is neither.
    """
    address = given or os.environ.get("RAY_ADDRESS", "")
    wanted = "HOST:PORT of a Ray cluster, or local to start one here"
    remedy = f"Start a cluster (docs/scale.md), {INSTEAD}."
    expect(address != "", "address", wanted, "none", remedy)
    if address != LOCAL:
        whole = re.fullmatch(r"[^\s:/\[\]]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", address)
        expect(whole is not None, "address", wanted, repr(address))
    return address


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, an IPv6 address in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_public(host: str) -> bool:
    """Whether a host has an address of the public internet.

    Args:
        host: A name or an address.

    Raises:
        ValueError: There is no such host.
    """
    try:
        found = socket.getaddrinfo(host, None)
    except OSError as error:
        message = f"address: expected a host that is known, got {host!r} ({error.strerror})."
        raise ValueError(message) from None
    plain = {str(entry[4][0]).partition("%")[0] for entry in found}
    return any(ipaddress.ip_address(one).is_global for one in plain)


def token_file() -> Path:
    """Where Ray looks for a token that is not in $RAY_AUTH_TOKEN."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def readable_by_others(file: Path) -> bool:
    """Whether others than its owner may read or write a file, where there are such permissions."""
    return os.name == "posix" and file.stat().st_mode & 0o077 != 0


def token_environment(address: str) -> dict[str, str]:
    """What has to be in the environment for Ray to use a token, where it does not say so itself.

    A cluster that is started here gets a token of its own, unless there is one.

    Args:
        address: Of the cluster.

    Raises:
        ValueError: A token is asked for, and there is none that can be read.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if mode not in ("", "token"):
        if address == LOCAL:
            warn("this Ray asks for no token: whoever reaches its ports runs code here.")
        return {}
    if os.environ.get("RAY_AUTH_TOKEN"):
        return {"RAY_AUTH_MODE": "token"}
    file = token_file()
    if file.is_file():
        readable = os.access(file, os.R_OK) and file.read_text().strip() != ""
        expect(readable, "token", "a token in a file that can be read", str(file))
        if readable_by_others(file):
            warn(f"others can read the token of Ray: chmod 600 {file}")
        return {"RAY_AUTH_MODE": "token"}
    expect("RAY_AUTH_TOKEN_PATH" not in os.environ, "token", "a file", str(file))
    if address == LOCAL:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    remedy = f"Copy it from the cluster into {file} (chmod 600), or set RAY_AUTH_TOKEN."
    expect(mode == "", "token", "the token of the cluster", "none", remedy)
    return {}


def warn(text: str) -> None:
    """Print a line of warning to stderr."""
    print(f"asrkit: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster until the block ends.

    Until then, what is printed to stdout goes to stderr, for Ray prints there. No usage statistics
    are sent, and no dashboard is started.

    A block that raises ClusterLostError leaves Ray as it is, since to leave a lost cluster takes a
    minute, after which Ray ends the process. That process has to end: it can join no other cluster.

    Args:
        address: As `address_of` returns it.

    Raises:
        ValueError: There is no token, or no such host.
        RuntimeError: The cluster cannot be joined, or none can be started.
    """
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_AUTO_CONNECT": "0",  # a thread that asks Ray once more would start a cluster
    }
    environment |= token_environment(address)
    with contextlib.ExitStack() as left:
        left.enter_context(_environment(environment))
        left.enter_context(_stdout_on_stderr())
        options: dict[str, Any] = {}
        if address == LOCAL:
            folder = left.enter_context(_private_folder())
            options = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
            options["_temp_dir"] = folder
        else:
            _expect_answer(address)
            left.enter_context(_warning_where_open(address))
        import ray
        import ray.data
        from ray._raylet import AuthenticationTokenLoader

        if ray.is_initialized():
            message = "address: expected no Ray in this process yet, got one that is connected."
            raise RuntimeError(f"{message} Call ray.shutdown() first.")
        AuthenticationTokenLoader.instance().reset_cache()  # it may be that of a cluster before
        left.push(partial(_leave, ray))
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:  # whatever keeps Ray from working is one line
            wanted = f"address: expected a Ray cluster that can be joined at {address}"
            remedy = "Compare its token and its version of Ray with those here."
            raise RuntimeError(f"{wanted}, got {class_and_message(error)}. {remedy}") from None
        for name in ("ray", "ray.data"):  # Ray's log files have the rest
            logging.getLogger(name).setLevel(logging.ERROR)
        host = ray.util.get_node_ip_address()
        if address != LOCAL:
            host, _ = host_and_port(address)
        _warn_where_public(address, host)
        yield ray


def _leave(ray: Any, kind: type[BaseException] | None, *_: object) -> None:
    """Leave a cluster, unless it is lost."""
    if kind is not None and issubclass(kind, ClusterLostError):
        atexit.unregister(ray.shutdown)
    else:
        ray.shutdown()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment that are not set, until the block ends."""
    new = [name for name in values if not os.environ.get(name)]
    for name in new:
        os.environ[name] = values[name]
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send what this process and Ray print to stdout to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _private_folder() -> Iterator[str]:
    """Yield a folder that nobody else can read, with a short path, for sockets are in it."""
    base = tempfile.gettempdir()
    if os.name == "posix" and len(base) > MOST_LETTERS:
        base = "/tmp"
    folder = tempfile.TemporaryDirectory(prefix="asrkit-ray-", dir=base, ignore_cleanup_errors=True)
    with folder as path:
        yield path


def _expect_answer(address: str) -> None:
    """RuntimeError where nobody listens at an address."""
    silence = why_silent(address)
    if silence:
        message = f"address: expected a Ray cluster at {address}, got no answer ({silence})."
        raise RuntimeError(f"{message} Start it, {INSTEAD}.")


def why_silent(address: str) -> str:
    """Why nobody answers at an address: "Connection refused"; "" where somebody does.

    Args:
        address: HOST:PORT.
    """
    try:
        socket.create_connection(host_and_port(address), timeout=ANSWER_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _warn_where_public(address: str, host: str) -> None:
    if is_public(host):
        what = f"the Ray at {address} has a public address"
        warn(f"{what}: whoever reaches its ports may run code there. Use a private network.")


@contextlib.contextmanager
def _warning_where_open(address: str) -> Iterator[None]:
    """Warn, while the block runs, of a cluster that answers those who have no token.

    Another process asks, for Ray reads its settings once in a process.
    """
    asking = subprocess.Popen(
        [sys.executable, "-c", OPEN, address],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def watch() -> None:
        if asking.wait() == 0:
            what = f"the Ray at {address} asks for no token"
            warn(f"{what}: whoever reaches its ports runs code there. See docs/scale.md.")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            asking.wait(ANSWER_S)  # a run that was done sooner
    finally:
        asking.kill()
        thread.join()


def room(ray: Any, need: Mapping[str, float], least: int, wanted: int | None) -> int:
    """How many actors a cluster has room for, `wanted` at most.

    Waits some seconds for `wanted`, for the actors of a run that was killed are about to leave.

    Args:
        ray: The module, connected.
        need: CPUs and GPUs of each actor, by Ray's names.
        least: How many there have to be.
        wanted: How many there shall be; None: as many as the cluster could hold if it were free.

    Raises:
        ValueError: There is no room for `least`; it says what is free.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    capacity = _fitting(nodes, need)
    goal = capacity
    if wanted is not None:
        goal = min(capacity, wanted)
    deadline = time.monotonic() + FREE_S
    free = _free(ray)
    while _fitting(free, need) < goal and capacity >= least and time.monotonic() < deadline:
        time.sleep(0.25)
        free = _free(ray)
    found = min(goal, _fitting(free, need))
    if found < least:
        each = " and ".join(_amount(amount, name) for name, amount in need.items())
        shares = " and ".join(_share(free, nodes, name) for name in ("CPU", "GPU"))
        got = f"room for {found}: {shares} are free on {_amount(len(nodes), 'node')}"
        remedy = "Pass fewer, wait until others are done, or add nodes."
        expect(False, "actors", f"room for {least} with {each} each", got, remedy)
    return found


def _free(ray: Any) -> list[Mapping[str, float]]:
    """What is free on each node that is alive, by Ray's names."""
    return list(ray._private.state.available_resources_per_node().values())


def _share(
    free: Sequence[Mapping[str, float]], all_: Sequence[Mapping[str, float]], name: str
) -> str:
    """How much is free of all nodes together: "1 of 8 CPUs"."""
    amount, of = (sum(node.get(name, 0.0) for node in nodes) for nodes in (free, all_))
    return f"{amount:g} of {_amount(of, name)}"


def _fitting(nodes: Sequence[Mapping[str, float]], need: Mapping[str, float]) -> int:
    """How many actors fit, each on one node; 1e-6 may be missing, for Ray rounds fractions."""
    return sum(
        min(int(node.get(name, 0.0) / amount + 1e-6) for name, amount in need.items())
        for node in nodes
    )


def _amount(number: float, name: str) -> str:
    return f"{number:g} {name}" + ("s" if number != 1 else "")
