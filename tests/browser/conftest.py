"""A chromium that reaches nothing but 127.0.0.1, and a JupyterLab there."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 300.0
FLAGS = [
    f"--disable-{what}"
    for what in (
        "quic",
        "background-networking",
        "component-update",
        "sync",
        "dev-shm-usage",
    )
]
FLAGS += [
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # a route would do, but turns the cache off
LOCAL = re.compile(
    r"(https?|wss?)://127\.0\.0\.1[:/]|(file|data|blob|about|chrome-error):"
)
SETTINGS = {  # of JupyterLab: no pop-up about news, and cells outside the screen are drawn too
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
FOLDERS = [f"JUPYTER_{name}_DIR" for name in ("CONFIG", "DATA", "RUNTIME")]
FOLDERS += [
    "IPYTHONDIR",
    *(f"JUPYTERLAB_{name}_DIR" for name in ("SETTINGS", "WORKSPACES")),
]


class Window:
    """Tabs that share a cache, with their requests to other machines and their errors."""

    def __init__(self, browser, **how):
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, **how}
        )
        self.outside, self.errors = [], []
        self.context.on("request", lambda request: self._note(request.url))
        self.context.on(
            "page",
            lambda page: page.on("websocket", lambda socket: self._note(socket.url)),
        )
        self.context.on(
            "console",
            lambda message: (
                message.type == "error" and self.errors.append(message.text)
            ),
        )
        self.context.on("weberror", lambda error: self.errors.append(str(error.error)))

    def _note(self, url):
        if not LOCAL.match(url):
            self.outside.append(url)

    def open(self, url):
        """A new tab that shows `url`."""
        page = self.context.new_page()
        page.goto(str(url))
        return page

    def forget(self):
        """Requests to other machines, and errors, since the last call."""
        problems = self.outside[:], self.errors[:]
        self.outside.clear(), self.errors.clear()
        return problems


class Lab:
    """A running JupyterLab that serves `folder`."""

    def __init__(self, folder, port, token):
        self.folder, self.base, self.token = folder, f"http://127.0.0.1:{port}", token

    def ask(self, where, method="GET", body=None):
        """The answer of the server's API."""
        request = urllib.request.Request(
            f"{self.base}/api/{where}?token={self.token}", method=method
        )
        request.data = json.dumps(body).encode() if body else None
        with urllib.request.urlopen(request, timeout=LONGEST_S) as answer:
            return json.load(answer) if answer.status != 204 else None

    @contextmanager
    def opened(self, window, name):
        """A tab with notebook `name` of the folder and a ready kernel, which is shut down afterwards.

        Ready is what the server says: one client, connected to an idle kernel. The page shows "idle" before there is a kernel.
        """
        kernel = {
            "kernel": {"name": "python3"},
            "name": name,
            "path": name,
            "type": "notebook",
        }
        here = f"sessions/{self.ask('sessions', 'POST', kernel)['id']}"  # it starts while the page loads
        page = window.open(f"{self.base}/doc/tree/{name}?token={self.token}")
        try:
            page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(
                timeout=1000 * LONGEST_S
            )
            wait_until(
                lambda: is_ready(self.ask(here)["kernel"]),
                "a kernel that is connected and idle",
            )
            yield page
        finally:
            page.close()
            self.ask(here, "DELETE")


def is_ready(kernel):
    """Whether the server's kernel is idle and has a client."""
    return kernel["connections"] >= 1 and kernel["execution_state"] == "idle"


def wait_until(holds, what):
    """Return once `holds()`; fail after a time that is long even on a busy machine."""
    end = time.monotonic() + LONGEST_S
    while not holds():
        assert time.monotonic() < end, f"waited {LONGEST_S:.0f} s for {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def browser(chromium):
    """The system's chromium, headless."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def window(browser):
    """A function (**settings) -> Window. The test fails if a page requests another machine or has an error."""
    windows = []

    def make(**how):
        windows.append(Window(browser, **how))
        return windows[-1]

    yield make
    for one in windows:
        one.context.close()
    assert [one.forget() for one in windows] == [([], [])] * len(windows)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab with settings, kernels and notebooks of its own."""
    base, token = tmp_path_factory.mktemp("lab"), secrets.token_hex(16)
    own = {name: str(base / name.lower()) for name in FOLDERS}
    for name, values in SETTINGS.items():
        file = Path(
            own["JUPYTERLAB_SETTINGS_DIR"], f"@jupyterlab/{name}.jupyterlab-settings"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    page_config = Path(own["JUPYTER_CONFIG_DIR"], "labconfig/page_config.json")
    page_config.parent.mkdir(parents=True)
    # The page would check whether extensions need a build, which runs node.
    page_config.write_text(json.dumps({"buildCheck": False, "buildAvailable": False}))
    for folder in (*own.values(), base / "notebooks"):
        Path(folder).mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    options += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    options += [f"--ServerApp.root_dir={base / 'notebooks'}"]
    command = [sys.executable, "-m", "jupyterlab", *options]
    quiet = {"OMP_WAIT_POLICY": "passive"}
    lab, log = Lab(base / "notebooks", port, token), base / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            env=os.environ | own | quiet,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until(lambda: answers(lab) or server.poll() is not None, "JupyterLab")
        assert server.poll() is None, log.read_text()[-2000:]
        yield lab
    finally:
        stop(server)


def answers(lab):
    """Whether the server is up."""
    try:
        return bool(lab.ask("status"))
    except OSError:
        return False


def stop(server):
    """End `server` and the rest of its process group; with it go its kernels, which watch for that."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, how)
            server.wait(15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


@pytest.fixture(scope="session")
def shots():
    """Folder of the screenshots: $ASRKIT_SCREENSHOTS, or reports/screenshots."""
    folder = Path(os.environ.get("ASRKIT_SCREENSHOTS", ROOT / "reports/screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
