"""The recogniser and the command in int8: what runs in it, what does not, and who is refused."""

from dataclasses import asdict

import pytest
import torch

from asrkit.cli import main
from asrkit.cpu import fast_dtype, has_int8
from asrkit.features import FeatureConfig
from asrkit.models import (
    Checkpoint,
    ConvConfig,
    CTCConfig,
    CTCModel,
    TransducerModel,
    presets,
    save_checkpoint,
)
from asrkit.models.int8 import Int8Linear
from asrkit.models.packed import Packed
from asrkit.text import CharTokenizer
from asrkit.transcribe import PipelineConfig, Recognizer
from asrkit.transcribe.recognizer import ModelVariants

ON_THIS_CPU = pytest.mark.skipif(not has_int8(), reason="needs a CPU with VNNI or AMX")
INT8 = PipelineConfig(precision="int8")


@pytest.fixture
def checkpoint():
    """A transducer of random weights that finds some labels in noise."""
    torch.manual_seed(0)
    model = TransducerModel(presets.tiny(vocab_size=28)).eval()
    return Checkpoint(
        model, CharTokenizer(), asdict(FeatureConfig()), {"max_symbols": 3}
    )


def noise(seconds=1.5):
    samples = round(16_000 * seconds)
    generator = torch.Generator().manual_seed(1)
    return 0.1 * torch.randn(2, samples, generator=generator), torch.tensor(
        [samples, samples // 2]
    )


@ON_THIS_CPU
def test_the_encoder_computes_in_int8_and_decoding_in_the_dtype_beside_it(checkpoint):
    variants = ModelVariants(checkpoint.model)
    plain = Recognizer(variants, PipelineConfig(precision="float32"))
    int8 = Recognizer(variants, INT8)
    assert (int8.dtype, int8.config.encoder) == (
        getattr(torch, fast_dtype()),
        "optimized",
    )
    assert Recognizer(variants, INT8).model is int8.model is not plain.model
    assert not any(isinstance(part, Packed) for part in checkpoint.model.modules())
    others = [
        part
        for name, part in int8.model.named_modules()
        if not name.startswith("encoder.")
    ]
    assert any(isinstance(part, Int8Linear) for part in int8.model.encoder.modules())
    assert not any(isinstance(part, Int8Linear) for part in others)
    features = plain.features(*noise())
    wanted, ends = plain.encode(*features)
    found, steps = int8.encode(*features)
    assert found.dtype == int8.dtype and torch.equal(steps, ends)
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.1
    assert int8.decode(found, steps).scores.isfinite().all()


@ON_THIS_CPU
def test_a_model_without_a_fastconformer_is_refused():
    model = CTCModel(
        CTCConfig(vocab_size=28, encoder=ConvConfig(width=16, layers=1))
    ).eval()
    said = (
        "^linear_layers: expected .* but for a FastConformer .*, got 'int8'. Compute in"
    )
    with pytest.raises(ValueError, match=said):
        Recognizer(model, INT8)


def without_vnni():
    return {"architecture": "x86_64", "avx2": True}


def test_a_cpu_without_vnni_is_refused_before_anything_is_done(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", without_vnni)
    with pytest.raises(ValueError, match="^int8: expected an x86 CPU with VNNI or AMX"):
        Recognizer.from_checkpoint(checkpoint, INT8)


@pytest.fixture
def saved(checkpoint, tmp_path):
    """The model as a file."""
    save_checkpoint(tmp_path / "model.safetensors", checkpoint)
    return str(tmp_path / "model.safetensors")


@ON_THIS_CPU
@pytest.mark.parametrize("shards", [False, True])
def test_the_command_transcribes_in_int8(saved, speech, tmp_path, capsys, shards):
    out = tmp_path / "text"
    command = [
        "transcribe",
        "--dtype",
        "float32",
        str(speech[0]),
        "--model",
        saved,
        "--dtype",
        "int8",
        "--out",
        str(out),
    ]
    if shards:
        command.append("--shards")
    assert main(command) == 0, capsys.readouterr().err
    assert "1 of 1" in capsys.readouterr().out
    assert any(path.is_file() for path in out.rglob("*"))
