"""asrkit's own checkpoints: the same model comes back, and what is damaged or does not fit is refused by name."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from asrkit.models import (
    Checkpoint,
    ConvConfig,
    CTCConfig,
    CTCModel,
    FastConformerConfig,
    JasperConfig,
    LSTMConfig,
    LSTMEncoderConfig,
    Stage,
    StatelessConfig,
    TransducerConfig,
    TransducerModel,
    WhisperEncoderConfig,
    load_checkpoint,
    save_checkpoint,
)
from asrkit.models.checkpoints import own
from asrkit.models.cpu.prepacked import prepack
from asrkit.models.folding import fold
from asrkit.text import CharTokenizer

FAST = FastConformerConfig(width=16, layers=1, heads=2, subsampling_channels=4)
NAME = "model.safetensors"


def small(**settings) -> TransducerModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 28,
        "encoder": ConvConfig(width=16, layers=1),
        "predictor": StatelessConfig(width=12, context=3),
        "joint_width": 10,
    }
    return TransducerModel(TransducerConfig(**sizes | settings)).eval()


def save(folder, model=None, tokenizer=None, features=None, notes=None):
    path = folder / NAME
    parts = (
        small() if model is None else model,
        tokenizer or CharTokenizer(),
        features or {},
        notes or {},
    )
    save_checkpoint(path, Checkpoint(*parts))
    return path


def edit(folder, change, **settings) -> None:
    """A checkpoint in `folder` whose header and weights went through `change`; settings: of its config."""
    path = save(folder, small(**settings))
    with safe_open(str(path), "pt") as file:
        header = json.loads(file.metadata()["asrkit"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    change(header, weights)
    save_file(weights, path, metadata={"asrkit": json.dumps(header)})


ENCODERS = [
    ConvConfig(width=16, layers=2),
    FAST,
    LSTMEncoderConfig(width=8, before=1, after=1),
    JasperConfig(bins=80, stages=(Stage(channels=4, kernel=3),)),
    WhisperEncoderConfig(width=8, layers=1, heads=2, most=4),
]


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("kind", ["transducer", "ctc"])
def test_a_checkpoint_brings_back_the_same_model(tmp_path, encoder, kind):
    model = small(encoder=encoder)
    if kind == "ctc":
        model = CTCModel(CTCConfig(vocab_size=28, encoder=encoder))
    save(tmp_path, model, features={"bins": 80}, notes={"step": 3})
    again = load_checkpoint(tmp_path)
    assert again[1:] == (CharTokenizer(), {"bins": 80}, {"step": 3})
    assert again.model.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    assert [path.name for path in tmp_path.iterdir()] == [NAME]  # no temporary remains


def test_a_field_that_an_older_header_lacks_has_its_default(tmp_path):
    def older(header, _):
        for field in ("ctc", "durations", "activation"):
            del header["model"][field]
        for field in ("context", "scale_input", "bias", "dropout_attention"):
            del header["model"]["encoder"][field]

    edit(tmp_path, older, encoder=FAST)
    assert load_checkpoint(tmp_path).model.config == small(encoder=FAST).config


DAMAGE = [
    (lambda header, _: header.pop("tokenizer"), "model: model.safetensors is damaged .it has no 'tokenizer'"),
    (lambda header, _: header.update(tokenizer="char"), "model: model.safetensors is damaged"),
    (lambda header, _: header.update(tokenizer={"alphabet": "abc"}), "tokenizer: expected 28 tokens, got 3"),
    (lambda header, _: header["features"].update(bins=40), "features: expected 80 bins, as the encoder has, got 40"),
    (lambda header, _: header["model"].update(surprise=1), "model: no config of this asrkit .*surprise"),
    (lambda header, _: header["model"].update(dropout="x"), "dropout: expected a finite number"),
    (lambda header, _: header["model"].update(joint_width=99), "model.safetensors: the weights do not fit its config"),
    (lambda header, _: header["model"]["predictor"].update(layers=10**4), "model: expected at most 31 layers, the number of its tensors, got 10000"),
    (lambda header, _: header.update(model=header["model"]["encoder"]), "model: "),
    (lambda _, weights: weights.update(other=weights.pop("output.bias")), "model.safetensors: .*Missing .*output.bias.*Unexpected .*other"),
    (lambda _, weights: weights.update({"output.bias": torch.zeros(29).long()}), "output.bias: expected floating-point weights, whole counters, got torch.int64"),
]  # fmt: skip


@pytest.mark.parametrize("damage, message", DAMAGE)
def test_what_is_damaged_or_does_not_fit_is_refused_in_one_line(
    tmp_path, damage, message
):
    edit(tmp_path, damage, predictor=LSTMConfig(width=12))
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content, message", [
    (None, "model: expected a .safetensors, .nemo or Jasper's .pt file, or a folder of a model, got no such file"),
    (b"not a model", "model: bad.safetensors is damaged .it is not a whole .safetensors file: .*Pass a"),
    (b"\2" + bytes(7) + b"{}", "model: expected a checkpoint written by asrkit, got bad.safetensors without its header"),
])  # fmt: skip
def test_what_is_not_a_checkpoint_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "bad.safetensors"
    if content:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{message}"):
        load_checkpoint(path)


@pytest.mark.parametrize("parts, message", [
    ({"notes": [1]}, "notes: expected a dict, got list"),
    ({"notes": {"a": {(1, 2): 3}}}, "notes: expected dicts with texts as keys"),
    ({"model": torch.nn.LSTM(2, 3)}, "checkpoint: expected a model of asrkit.models, got LSTM"),
    ({"tokenizer": CharTokenizer("abc")}, "tokenizer: expected 28 tokens, got 3"),
    ({"features": {"mels": 80}}, "features: expected settings of FeatureConfig, got .'mels'"),
    ({"model": prepack(small())}, "model: expected layers that are not prepacked, got prepacked ones"),
    ({"model": fold(small(encoder=FAST))}, "model: .*Missing key.*batch_norm.* Save a model before it is optimized"),
])  # fmt: skip
def test_what_would_not_load_is_not_saved(tmp_path, parts, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        save(tmp_path, **parts)
    assert not [*tmp_path.iterdir()]


def test_a_file_with_another_suffix_is_not_saved(tmp_path):
    checkpoint = Checkpoint(small(), CharTokenizer(), {}, {})
    with pytest.raises(
        ValueError, match=r"^path: expected a .safetensors file, got 'x.pt'"
    ):
        save_checkpoint(str(tmp_path / "x.pt"), checkpoint)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("around", [
    torch.nn.DataParallel,
    torch.optim.swa_utils.AveragedModel,
    torch.compile,
    lambda model: torch.nn.DataParallel(torch.compile(model)),
])  # fmt: skip
def test_wrappers_of_torch_are_removed(tmp_path, around):
    model = small()
    loaded = load_checkpoint(save(tmp_path, around(model))).model
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_weights_that_are_tied_are_saved_under_both_names(tmp_path):
    model = small(predictor=StatelessConfig(width=16, context=3), joint_width=16)
    model.encoder_projection = model.predictor_projection
    loaded = load_checkpoint(save(tmp_path, model)).model
    for part in (loaded.encoder_projection, loaded.predictor_projection):
        assert torch.equal(part.weight, model.predictor_projection.weight)


def test_numbers_of_numpy_are_saved_as_plain_ones(tmp_path):
    model = small(joint_width=np.int64(10), dropout=np.float32(0.5))
    path = save(
        tmp_path, model, features={"bins": np.int64(80)}, notes={"step": np.int32(3)}
    )
    again = load_checkpoint(path)
    assert (again.model.config, *again[2:]) == (model.config, {"bins": 80}, {"step": 3})


def test_a_loaded_model_has_let_go_of_its_file(tmp_path):
    model = small()
    path = save(tmp_path, model)
    loaded = load_checkpoint(path).model
    with path.open("r+b") as file:  # in place, as a copy over it would be
        file.write(bytes(path.stat().st_size))
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
        assert loaded.state_dict()[name].data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_get_the_requested_dtype_and_counters_stay_integers(tmp_path, dtype):
    model = small(encoder=FAST)
    loaded = load_checkpoint(save(tmp_path, model), dtype=dtype).model
    for name, value in model.state_dict().items():
        wanted = value.to(dtype) if value.is_floating_point() else value
        torch.testing.assert_close(loaded.state_dict()[name], wanted, rtol=0, atol=0)
    with pytest.raises(ValueError, match="^dtype: expected a floating-point dtype"):
        load_checkpoint(tmp_path, dtype=torch.int8)
    with pytest.raises(ValueError, match="^dtype: .* torch.float32, got 'bfloat16'"):
        load_checkpoint(tmp_path, dtype="bfloat16")
    with pytest.raises(ValueError, match="^device: expected one with memory for the"):
        load_checkpoint(tmp_path, device="meta")


FULL = """
import resource, sys
from asrkit.models import load_checkpoint, save_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
save_checkpoint(sys.argv[1], load_checkpoint(sys.argv[1]))
"""


def test_a_full_disk_is_reported_and_the_old_file_stays(tmp_path):
    pytest.importorskip("resource")
    path = save(tmp_path)
    before = path.read_bytes()
    command = [sys.executable, "-c", FULL, str(path)]
    output = subprocess.run(command, capture_output=True, text=True).stderr
    assert f"OSError: {path} cannot be written. Is the disk full? (" in output
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


SCRIPT = """
import sys
from asrkit.memory import peak_memory
from asrkit.models.common import without_memory
from asrkit.models.presets import make_model, whisper_tiny, parakeet_rnnt_0_6b, tiny_aed
with without_memory():
    make_model(whisper_tiny()), make_model(parakeet_rnnt_0_6b()), make_model(tiny_aed())
peak_memory(dict)
print([name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))])
"""


def test_neither_a_model_without_memory_nor_a_peak_imports_torchs_compiler():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.uint16])
def test_tensors_of_other_dtypes_and_none_at_all_are_read(dtype, tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.arange(6.0).to(dtype), "empty": torch.empty(0, 3)}
    save_file(tensors, path)
    found, _ = own.read_safetensors(path)
    assert torch.equal(found["a"].float(), tensors["a"].float())
    assert found["empty"].shape == (0, 3)
