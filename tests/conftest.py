"""What every test stands on: tests of a GPU or a browser are skipped, and counted, where there is none; fresh memory holds NaN."""

import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # read when torch is imported: threads that spin starve a busy machine
import torch
from hypothesis import settings

settings.register_profile(
    "asrkit", deadline=None
)  # no test asserts a time: the first example may load a library
settings.load_profile("asrkit")
with torch.device(
    "meta"
):  # torch notes here, once, which functions it redirects: before a test replaces torch.empty
    torch.empty(1)


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
LACKS = {
    "gpu": "" if torch.cuda.is_available() else "no CUDA device",
    "browser": "" if CHROMIUM else "no chromium",
}


def pytest_collection_modifyitems(config, items):
    """Skip what is marked `gpu` or `browser` where there is none (REQUIRE_BROWSER=1: fail); tests of a browser come last."""
    items.sort(
        key=lambda item: bool(item.get_closest_marker("browser"))
    )  # what they need, others may have made
    if hasattr(config, "workerinput"):
        items.sort(key=turn)
    for item in items:
        for marker, lack in LACKS.items():
            required = marker == "browser" and os.environ.get("REQUIRE_BROWSER", "") not in (
                "",
                "0",
            )
            if lack and not required and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=lack))


def turn(item):
    """When a test's file has its turn where two run at once: the longest first, and JupyterLab once the series has left a model."""
    places = {"test_notebooks.py": 0, "test_lab.py": 2, "test_pages.py": 4}
    return places.get(item.path.name, 1 if item.path.parent.name == "bench" else 3)


def pytest_terminal_summary(terminalreporter):
    """Say how much of the suite this machine could not run."""
    skipped = terminalreporter.stats.get("skipped", [])
    for marker, name in {"gpu": "GPU", "browser": "browser"}.items():
        count = sum(marker in getattr(report, "keywords", ()) for report in skipped)
        terminalreporter.write_line(
            f"{count} {name} tests were skipped: {LACKS[marker]}"
            if count
            else f"no {name} test was skipped"
        )


@pytest.fixture(scope="session")
def chromium():
    """Path of the browser."""
    return CHROMIUM or pytest.fail(
        "REQUIRE_BROWSER is set, and there is no chromium, chromium-browser or google-chrome."
    )


@pytest.fixture(scope="session")
def series_home(request, tmp_path_factory):
    """$ASRKIT_HOME of whole notebooks, one for all processes: corpora and the demo model are made once, by whoever comes first."""
    base = tmp_path_factory.getbasetemp()
    home = (base.parent if hasattr(request.config, "workerinput") else base) / "series_home"
    home.mkdir(exist_ok=True)
    return home


@pytest.fixture(autouse=True)
def fresh_memory_is_nan(monkeypatch):
    """`torch.empty` and `empty_like` of floats come filled with NaN, so that code which reads them is found out."""
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)

        def poisoned(*args, plain=plain, **kwargs):
            made = plain(*args, **kwargs)
            if made.is_floating_point() and made.device.type == "cpu":
                with torch.no_grad():
                    made.fill_(float("nan"))
            return made

        monkeypatch.setattr(torch, name, poisoned)


@pytest.fixture
def one_thread():
    """One torch thread: threads that meet on a busy machine wait longer than small tensors take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared_speech():
    """Folder of real recordings with manifests: $ASRKIT_SHARED/speech, or beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("ASRKIT_SHARED", beside)) / "speech"
    if not (folder / "manifests").is_dir():
        pytest.skip(
            "needs real recordings: set ASRKIT_SHARED to a folder that holds speech/manifests"
        )
    return folder


@pytest.fixture(scope="session")
def tiny_speech(tmp_path_factory):
    """Thirty synthetic utterances in memory, made once a session in an $ASRKIT_HOME of its own."""
    from asrkit.data import Utterances, corpora

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASRKIT_HOME", str(tmp_path_factory.mktemp("home")))
        cuts = corpora.spoken_commands(train=30, dev=3, test=3, progress=False)["train"]
        return Utterances.load(cuts, progress=False)
