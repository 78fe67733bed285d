"""The memory of a program that loads a model and transcribes, by bytes for each weight."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asrkit.cpu import has_int8
from asrkit.models import (
    Checkpoint,
    CTCConfig,
    CTCModel,
    FastConformerConfig,
    load_checkpoint,
    optimize,
    save_checkpoint,
)
from asrkit.text import CharTokenizer
from asrkit.transcribe import PipelineConfig, Recognizer

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MOST_B = {"float32": 4.8, "bfloat16": 3.0, "int8": 2.4}  # for each weight, at the peak
SCRIPT = """
import sys
from pathlib import Path
import torch
import asrkit.transcribe.windows  # before the measurement starts
from asrkit.memory import share_memory_pool
from asrkit.transcribe.plan import Plan

def peak_B():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def load(path):
    return Plan(model=Path(path), dtype=sys.argv[1]).resolved("cpu").load("cpu")

torch.set_num_threads(1)
share_memory_pool()
load(sys.argv[2])  # a small model, with which libraries are loaded
before_B = peak_B()
model = load(sys.argv[3])
print(peak_B() - before_B)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files in float32 by the number of their weights: 2 and 13 million."""
    files = {}
    for layers in (1, 8):
        torch.manual_seed(0)
        sizes = {"width": 256, "layers": layers, "subsampling_channels": 32}
        encoder = FastConformerConfig(**sizes)
        model = CTCModel(CTCConfig(vocab_size=28, encoder=encoder)).eval()
        path = tmp_path_factory.mktemp("model") / "model.safetensors"
        save_checkpoint(path, Checkpoint(model, CharTokenizer(), {}, {}))
        files[sum(weight.numel() for weight in model.parameters())] = path
    return files


@LINUX
@pytest.mark.parametrize("dtype", MOST_B)
def test_weights_are_in_memory_once_and_in_their_dtype_alone(saved, dtype):
    if dtype == "int8" and not has_int8():
        pytest.skip("needs a CPU with products of int8")
    command = [sys.executable, "-c", SCRIPT, dtype, *map(str, saved.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) / max(saved) <= MOST_B[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_model_that_is_read_from_its_file_layer_by_layer_computes_the_same(
    saved, tmp_path, dtype
):
    path = Path(shutil.copy(saved[min(saved)], tmp_path))
    features = torch.randn(2, 101, 80)
    lengths = torch.tensor([101, 40])
    whole = optimize(load_checkpoint(path, dtype=dtype).model)
    by_layer = optimize(load_checkpoint(path, dtype=None).model, dtype=dtype)
    with path.open("r+b") as file:  # which the model needs no more
        file.write(bytes(path.stat().st_size))
    found = by_layer(features, lengths)[0]
    assert torch.equal(found, whole(features, lengths)[0])


@pytest.mark.parametrize("how", [{"encoder": "eager"}, {"precision": "autocast"}])
def test_an_eager_recognizer_in_place_has_weights_of_its_own(saved, tmp_path, how):
    path = Path(shutil.copy(saved[min(saved)], tmp_path))
    whole = load_checkpoint(path).model.state_dict()
    mapped = load_checkpoint(path, dtype=None)
    assert not any(weight.requires_grad for weight in mapped.model.parameters())
    config = PipelineConfig(**how)
    found = Recognizer.from_checkpoint(mapped, config, in_place=True).model.state_dict()
    with path.open("r+b") as file:  # which the model needs no more
        file.write(bytes(path.stat().st_size))
    assert all(torch.equal(found[name], weight) for name, weight in whole.items())
