"""The recogniser and the command in int8: which layers use it, and which models and CPUs are refused."""

import pytest
import torch

from asrkit.cpu import fast_dtype, has_int8
from asrkit.models import save_checkpoint
from asrkit.models.cpu.int8 import Int8Linear
from asrkit.transcribe import PipelineConfig, Recognizer
from asrkit.transcribe.plan import Plan
from asrkit.transcribe.recognizer import ModelVariants

ON_THIS_CPU = pytest.mark.skipif(not has_int8(), reason="needs a CPU with AVX2")
INT8 = PipelineConfig(precision="int8")


@ON_THIS_CPU
def test_the_encoder_computes_in_int8_and_decoding_in_the_other_dtype(transducer):
    variants = ModelVariants(transducer.model)
    plain = Recognizer(variants, PipelineConfig(precision="float32"))
    int8 = Recognizer(variants, INT8)
    assert int8.dtype == getattr(torch, fast_dtype())
    assert Recognizer(variants, INT8).model is int8.model is not plain.model
    parts = int8.model.named_modules()
    names = [name for name, part in parts if isinstance(part, Int8Linear)]
    assert names
    assert all(name.startswith("encoder.") for name in names)
    noise = 0.1 * torch.randn(1, 24_000, generator=torch.Generator().manual_seed(1))
    features = plain.features(noise, torch.tensor([24_000]))
    wanted, _ = plain.encode(*features)
    found, ends = int8.encode(*features)
    assert found.dtype == int8.dtype
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.1
    assert int8.decode(found, ends).scores.isfinite().all()


def test_another_cpu_is_refused_before_anything_is_done(transducer, monkeypatch):
    arm = {"architecture": "aarch64", "dot": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: arm)
    with pytest.raises(ValueError, match="^int8: expected an x86 CPU with AVX2, got"):
        Recognizer.from_checkpoint(transducer, INT8)


@ON_THIS_CPU
@pytest.mark.parametrize("more", ["", "--shards --workers 1 --threads 1"])
def test_the_command_transcribes_in_int8(transducer, speech, tmp_path, typed, more):
    model, out = tmp_path / "model.safetensors", tmp_path / "text"
    save_checkpoint(model, transducer)
    how = ("--model", model, "--dtype int8 --out", out, more)
    code, output, _ = typed(speech[0], *how)
    assert code == 0
    assert "1 of 1" in output
    assert any(path.is_file() for path in out.rglob("*"))


AVX2 = {"avx2": True}
BFLOAT16 = {"avx2": True, "avx512_bf16": True}
CTRANSLATE2 = {"config.json": "{}", "model.bin": ""}
HUGGING_FACE = {"config.json": '{"model_type": "whisper"}'}
PARAKEET = {"config.json": '{"model_type": "parakeet_ctc"}'}


@pytest.mark.parametrize("dtype, files, flags, wanted", [
    ("int8", {}, BFLOAT16, "int8 beside bfloat16"),
    ("int8", {}, AVX2, "int8 beside float32"),
    ("float16", CTRANSLATE2, AVX2, "float16"),
    ("auto", CTRANSLATE2, BFLOAT16, "bfloat16"),
    ("auto", CTRANSLATE2, AVX2, "int8 beside float32"),
    ("auto", HUGGING_FACE, AVX2, "int8 beside float32"),
    ("auto", HUGGING_FACE, {}, "float32"),
    ("auto", PARAKEET, AVX2, "float32"),
    ("auto", {"model.bin": ""}, AVX2, "float32"),
])  # fmt: skip
def test_dtype_by_model_and_cpu(monkeypatch, tmp_path, dtype, files, flags, wanted):
    monkeypatch.setattr("asrkit.cpu._limited", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    plan = Plan(model=tmp_path, dtype=dtype)
    assert plan.resolved("cpu").arithmetic == wanted
    if dtype == "auto":  # without a GPU
        assert plan.resolved("cuda").arithmetic == "float32"
