"""Cached kernels are recompiled if, and only if, one of their source files changes."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from asrkit import compilers

PACKAGE = Path(compilers.__file__).parent
KERNEL = (
    "def kernel(x):\n    return flush(x)\n"  # flush comes from simd.py, another file
)


@pytest.fixture
def package(tmp_path):
    """A package of two folders; the kernel is in `losses/`."""
    (tmp_path / "losses").mkdir()
    (tmp_path / "models").mkdir()
    shutil.copy(PACKAGE / "compilers.py", tmp_path)
    shutil.copy(PACKAGE / "losses/simd.py", tmp_path / "losses")
    (tmp_path / "losses/kernel.py").write_text(KERNEL)
    (tmp_path / "models/encoder.py").write_text("")
    return tmp_path


@pytest.fixture
def start(package, monkeypatch):
    """Function that loads the package's kernel as a new process would."""
    monkeypatch.setattr("numba.config.CACHE_DIR", "")

    def load(name):
        path = package / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"copied_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    def start():
        module = load("losses/kernel")
        module.flush = load("losses/simd").flush
        return load("compilers").compiled(module.kernel)

    return start


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def hits(kernel):
    return sum(kernel.stats.cache_hits.values())


def test_a_kernel_is_cached_until_a_file_that_it_calls_changes(package, start):
    first = start()
    second = start()
    assert (first(0.5), hits(first)) == (0.5, 0)
    assert (second(0.5), hits(second)) == (0.5, 1)
    assert list((package / "losses/__pycache__").glob("*.nbi"))
    edit(package / "losses/simd.py", "< F(TINY)", "< F(1.0)")
    changed = start()
    kept = start()
    assert (changed(0.5), hits(changed)) == (0.0, 0)
    assert (kept(0.5), hits(kept)) == (0.0, 1)
    # the old code is gone
    assert len(list((package / "losses/__pycache__").glob("*.nbc"))) == 1


def test_new_compiler_options_recompile_and_a_change_of_another_folder_does_not(
    package, start
):
    start()(0.5)
    (package / "models/encoder.py").write_text("x = 1\n")
    kernel = start()
    assert (kernel(0.5), hits(kernel)) == (0.5, 1)
    options = "cache=True, **options", "cache=True, fastmath=True, **options"
    edit(package / "compilers.py", *options)
    kernel = start()
    assert (kernel(0.5), hits(kernel)) == (0.5, 0)


def calls(start):
    """Number of warnings from two kernels of one process; both results must be right."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = start()
        # two types: both are compiled and cached
        assert (kernel(0.5), kernel(1)) == (0.5, 1)
    return sum("Numba's cache on disk" in str(warning.message) for warning in caught)


@pytest.mark.parametrize(("suffix", "share"), [("nbi", 0), ("nbi", 0.5), ("nbc", 0.5)])
def test_a_truncated_file_is_recompiled_with_one_warning_and_rewritten(
    package, start, suffix, share
):
    assert calls(start) == 0
    for file in package.rglob(f"*.{suffix}"):
        os.truncate(file, int(share * file.stat().st_size))
    assert calls(start) == 1
    assert calls(start) == 0


def test_a_full_disk_disables_the_cache_with_a_warning(start):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a long write fails, as on a full disk
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        warned = calls(start)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert warned == 1


def test_without_a_writable_folder_a_warning_names_the_variable_that_sets_one(
    package, start, monkeypatch
):
    (package / "losses/__pycache__").write_text(
        "a file, because root can write in any folder"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR") as warned:
        assert start()(0.5) == 0.5
    assert len(warned) == 1


def test_without_numbas_compiler_losses_and_decoders_use_and_report_fallbacks():
    code = """
import torch
from asrkit.decoders import ctc_greedy
from asrkit.losses import rnnt_loss, rnnt_loss_lean
torch.manual_seed(0)
sizes = (torch.ones(1, 2, dtype=torch.int64), torch.tensor([4]), torch.tensor([2]))
logits = torch.randn(1, 4, 3, 5)
plain = rnnt_loss(logits, *sizes, blank=0, impl="reference")
torch.testing.assert_close(rnnt_loss(logits, *sizes, blank=0), plain)
lean = (torch.randn(1, 4, 6), torch.randn(1, 3, 6), torch.randn(5, 6), torch.randn(5))
assert rnnt_loss_lean(*lean, *sizes, activation="relu", blank=0).isfinite().all()
assert ctc_greedy(torch.randn(1, 4, 5).log_softmax(-1), torch.tensor([4])).impl == "batched"
try:
    rnnt_loss(logits, *sizes, blank=0, impl="numba_cpu")
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    refused = "got 'numba_cpu', which fails here: NUMBA_DISABLE_JIT is set."
    assert refused in done.stdout
