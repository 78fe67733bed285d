"""What can be had of Numba's CUDA and Triton: a package that is there and broken costs its own kernels, and is named."""

import os
import subprocess
import sys

import pytest

from asrkit import runtime

ASK = """
import torch
from asrkit.losses import rnnt_loss
from asrkit.runtime import lacks
print(lacks("numba_cuda"), lacks("triton"), sep="|")
try:
    rnnt_loss(torch.zeros(1, 2, 2, 3), torch.tensor([[0]]), torch.tensor([2]), torch.tensor([1]), impl="numba_cuda")
except ValueError as error:
    print(error)
"""
SAID = "impl: expected 'wavefront', got 'numba_cuda', which fails here: {}. pip install 'asrkit[cuda]'."


@pytest.mark.parametrize(("text", "said"), [
    ("raise RuntimeError('built for another driver')", "RuntimeError: built for another driver"),
    ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
])  # fmt: skip
def test_a_broken_numba_cuda_costs_only_its_own_kernels(tmp_path, text, said):
    (tmp_path / "numba_cuda").mkdir()
    (tmp_path / "numba_cuda" / "__init__.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    broken, triton, error = done.stdout.replace("\n", "|").rstrip("|").split("|")
    assert (broken, triton, error) == (said, "", SAID.format(said))


def test_the_toolkit_is_that_of_the_variable_then_of_nvcc_then_of_the_wheels(monkeypatch, tmp_path):
    def toolkit(folder):
        (folder / "nvvm" / "libdevice").mkdir(parents=True)
        (folder / "nvvm" / "libdevice" / "libdevice.10.bc").touch()
        return folder

    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    wheels, own = toolkit(tmp_path / "site" / "nvidia" / "cu13"), toolkit(tmp_path / "cuda-13.0")
    (own / "bin").mkdir()
    (own / "bin" / "nvcc").touch()
    (tmp_path / "nvcc").symlink_to(own / "bin" / "nvcc")
    monkeypatch.setattr(runtime.sysconfig, "get_path", lambda name: str(tmp_path / "site"))
    monkeypatch.setattr(runtime.shutil, "which", lambda name: str(tmp_path / "nvcc"))
    assert runtime.toolkit() == own
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text(
        "#!/bin/sh"
    )  # a script that calls another one: its folder is no toolkit
    monkeypatch.setattr(runtime.shutil, "which", lambda name: str(tmp_path / "bin" / "nvcc"))
    assert runtime.toolkit() == wheels
    monkeypatch.setenv("CUDA_HOME", "elsewhere")
    assert str(runtime.toolkit()) == "elsewhere"
