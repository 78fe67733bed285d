"""What every test stands on: skips are counted by reason, fresh memory holds NaN, nothing asserts a time."""

import codecs
import importlib.util
import json
import multiprocessing
import os
import shutil
import tempfile
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import pytest

# Read when torch is imported: threads that spin starve a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# More would be processes that import torch, each to compile a few small kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
import torch

if importlib.util.find_spec("hypothesis"):  # a bare GPU machine has none
    from hypothesis import settings

    # No test asserts a time: the first example may load a library.
    for profile, examples in {"asrkit": 60, "ci": 500, "nightly": 3000}.items():
        settings.register_profile(
            profile, deadline=None, max_examples=examples, print_blob=True
        )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "asrkit"))
# torch notes here, once, which functions it redirects: before a test replaces torch.empty.
with torch.device("meta"):
    torch.empty(1)

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
LACKS = {
    "gpu": "" if torch.cuda.is_available() else "no CUDA device",
    "browser": "" if CHROMIUM else "no chromium",
}
# What processes that train or compute together load: seconds of work.
LOADED_ONCE = ["torch", "torch._dynamo", "torch.distributed.fsdp", "asrkit.training"]
# The reasons for a skip that FAIL_ON_SKIP lets pass: what no package index can bring.
UNAVOIDABLE = (
    "no CUDA device",
    "needs a CPU with",  # AVX2, VNNI or bfloat16: hosted runners have older ones too
    "needs a network namespace",
    "needs a namespace",  # of users and mounts
    "no published weights",  # a package of others, which may vanish
)


def pytest_collection_modifyitems(config, items):
    """Skip what is marked `gpu` or `browser` where there is none; sort the files."""
    if hasattr(config, "workerinput"):
        items.sort(key=turn)
    for item in items:
        for marker, lack in LACKS.items():
            if lack and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=lack))


def turn(item):
    """When a test's file has its turn where several run at once: the longest first."""
    places = {
        "test_notebooks.py": 0,
        "test_ray.py": 2,
    }
    return places.get(item.path.name, 1 if item.path.parent.name == "benchmarks" else 3)


def skips(terminalreporter):
    """How many tests were skipped, by reason."""
    reports = terminalreporter.stats.get("skipped", [])
    return Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports
    )


def avoidable(reasons):
    """The reasons for a skip that FAIL_ON_SKIP=1 makes a failure; none where it is not set."""
    if os.environ.get("FAIL_ON_SKIP", "") in ("", "0"):
        return []
    return [reason for reason in reasons if not reason.startswith(UNAVOIDABLE)]


def pytest_sessionfinish(session):
    """Fail a run under FAIL_ON_SKIP=1 that skipped what it could have run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        reporter
        and avoidable(skips(reporter))
        and session.exitstatus == pytest.ExitCode.OK
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Say in one line how many tests were skipped, and why."""
    reasons = skips(terminalreporter)
    if not reasons:
        terminalreporter.write_line("no test was skipped")
        return
    listed = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    terminalreporter.write_line(f"{reasons.total()} tests were skipped: {listed}")
    if wrong := avoidable(reasons):
        terminalreporter.write_line(
            f"FAIL_ON_SKIP: these reasons can be mended: {'; '.join(wrong)}"
        )


@pytest.fixture(scope="session")
def chromium():
    """Path of the browser."""
    return CHROMIUM


@pytest.fixture(scope="session")
def series():
    """Folder of the report of the whole series, which `make test-live` has just run."""
    return ROOT / "reports/latest"


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
def start_method():
    """How tests start processes that compute together: as forks of one that has loaded torch and computed nothing."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    forkserver.set_forkserver_preload(LOADED_ONCE)
    forkserver.ensure_running()  # with the environment of now, not of the first test
    return "forkserver"


@pytest.fixture(scope="session")
def tiny_speech(tmp_path_factory):
    """Thirty synthetic utterances in memory, made once a session in an $ASRKIT_HOME of its own."""
    from asrkit.data import Utterances, corpora

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASRKIT_HOME", str(tmp_path_factory.mktemp("home")))
        cuts = corpora.spoken_commands(train=30, dev=3, test=3, progress=False)["train"]
        return Utterances.load(cuts, progress=False)


@pytest.fixture(scope="session")
def train_pieces():
    """A function of texts, vocab_size and options: their tokenizer of SentencePiece."""
    import io

    import sentencepiece

    from asrkit.text import SentencePieceTokenizer

    def train(texts, vocab_size, **options):
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=out, vocab_size=vocab_size,
            bos_id=-1, eos_id=-1, hard_vocab_limit=False, minloglevel=2, **options,
        )  # fmt: skip
        return SentencePieceTokenizer(out.getvalue())

    return train


def module(path):
    """A file of the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """A small model as NeMo saves one, under the name of a published one."""
    from asrkit.features import FeatureConfig, mel_bands

    cases = module("tests/models/parity_cases.py")
    golden = json.loads((ROOT / "tests/golden/nemo.json").read_text())["tdt"]
    weights = {name: torch.zeros(shape) for name, shape in golden["shapes"].items()}
    weights["preprocessor.featurizer.window"] = torch.hann_window(400, periodic=False)
    weights["preprocessor.featurizer.fb"] = mel_bands(FeatureConfig()).T[None]
    path = tmp_path_factory.mktemp("published") / "parakeet-tdt-0.6b-v2.nemo"
    cases.write_nemo(
        path, cases.nemo_config(cases.golden_cases()["tdt"]), cases.fill(weights)
    )
    return path


@pytest.fixture
def ordinary_folder():
    """An empty folder of an account that permissions hold for, which the test runs as: not root."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    # That account may not read Python's files, and a codec that failed once is never found again.
    codecs.lookup("utf-8-sig")
    if is_root:
        os.seteuid(65_534)
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        shutil.rmtree(folder)
