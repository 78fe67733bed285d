import json
import re
import subprocess
import sys

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
    LSTMConfig,
    StatelessConfig,
    TransducerConfig,
    TransducerModel,
    load_checkpoint,
    save_checkpoint,
)
from asrkit.models.inference import fold
from asrkit.models.packed import pack
from asrkit.text import CharTokenizer


def small(**settings) -> TransducerModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 28,
        "encoder": ConvConfig(width=16, layers=1),
        "joint_width": 10,
    }
    return TransducerModel(
        TransducerConfig(
            **sizes | {"predictor": StatelessConfig(width=12, context=3)} | settings
        )
    ).eval()


@pytest.mark.parametrize(
    "encoder",
    [ConvConfig(width=16, layers=2), FastConformerConfig(width=16, layers=1, heads=2)],
)
@pytest.mark.parametrize("kind", ["transducer", "ctc"])
def test_a_checkpoint_brings_back_the_same_model(tmp_path, encoder, kind):
    model = (
        small(encoder=encoder)
        if kind == "transducer"
        else CTCModel(CTCConfig(vocab_size=28, encoder=encoder))
    )
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, Checkpoint(model, CharTokenizer(), {"bins": 80}, {"step": 3}))
    again = load_checkpoint(tmp_path)
    assert again.tokenizer == CharTokenizer()
    assert (again.features, again.notes, again.model.config) == (
        {"bins": 80},
        {"step": 3},
        model.config,
    )
    for name, value in model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    assert [p.name for p in tmp_path.iterdir()] == [
        "model.safetensors"
    ]  # no temporary left behind


def test_what_is_not_a_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(
        ValueError,
        match="model: expected a .safetensors or .nemo file, a training or Hugging Face folder",
    ):
        load_checkpoint(tmp_path / "none.safetensors")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"not a model")
    with pytest.raises(
        ValueError,
        match="bad.safetensors is damaged .it is no whole .safetensors file: .*Pass a",
    ):
        load_checkpoint(bad)
    save_file({"x": torch.zeros(1)}, bad)
    with pytest.raises(ValueError, match="without its header"):
        load_checkpoint(bad)


def test_missing_unknown_weights_and_fields_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, Checkpoint(small(), CharTokenizer(), {}, {}))
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        header = json.loads(file.metadata()["asrkit"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    renamed = {
        name.replace("output.bias", "output.offset"): value
        for name, value in weights.items()
    }
    save_file(renamed, path, metadata={"asrkit": json.dumps(header)})
    with pytest.raises(
        ValueError, match="Missing .*output.bias.*Unexpected .*output.offset"
    ):
        load_checkpoint(path)
    header["model"]["surprise"] = 1
    save_file(weights, path, metadata={"asrkit": json.dumps(header)})
    with pytest.raises(ValueError, match="surprise"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda header: header.pop("tokenizer"),
        lambda header: header.update(model="x"),
        lambda header: header["model"].update(joint_width=99),
        lambda header: header.update(model=header["model"]["encoder"]),
    ],
    ids=["no tokenizer", "no model", "other width", "an encoder"],
)
def test_a_header_that_is_damaged_or_of_other_weights_is_refused_in_one_line(
    tmp_path, damage
):
    header = edit_header(tmp_path, damage)
    with pytest.raises(
        ValueError,
        match="model.safetensors( is damaged| are no dict|: the weights are not)|of a transducer, CTC or",
    ) as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value) and header


@pytest.mark.parametrize("part", ["encoder", "predictor"])
def test_more_layers_than_the_file_has_tensors_are_refused_before_they_are_made(
    tmp_path, part
):
    edit_header(
        tmp_path,
        lambda header: header["model"][part].update(layers=10**4),
        predictor=LSTMConfig(width=12),
    )
    with pytest.raises(
        ValueError,
        match="^model: expected at most 31 layers, the number of its tensors, got 10000.$",
    ):
        load_checkpoint(tmp_path)


def test_features_of_other_bins_than_the_encoders_are_refused(tmp_path):
    edit_header(tmp_path, lambda header: header["features"].update(bins=40))
    with pytest.raises(
        ValueError, match="^features: expected 80 bins, as the encoder has, got 40.$"
    ):
        load_checkpoint(tmp_path)


def test_a_field_that_an_older_header_lacks_has_its_default(tmp_path):
    """Fields that came later: a file from before has none of them."""
    later = (
        "context",
        "scale_input",
        "bias",
        "dropout_attention",
        "dropout_input",
        "dropout_positions",
    )

    def older(header):
        for field in ("ctc", "durations", "activation"):
            del header["model"][field]
        for field in later:
            del header["model"]["encoder"][field]

    encoder = FastConformerConfig(width=16, layers=1, heads=2)
    edit_header(tmp_path, older, encoder=encoder)
    assert load_checkpoint(tmp_path).model.config == small(encoder=encoder).config


@pytest.mark.parametrize("change, said", [
    (pack, r"^model: expected layers that are not packed, got packed ones, which cannot be saved\."),
    (fold, r"^model: .*Missing key.*encoder\.blocks\.0\.batch_norm\..* Save a model before it is optimized\.$"),
])  # fmt: skip
def test_a_packed_or_folded_model_is_not_saved_in_part(tmp_path, change, said):
    model, path = (
        small(encoder=FastConformerConfig(width=16, layers=1, heads=2)).eval(),
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match=said):
        save_checkpoint(path, Checkpoint(change(model), CharTokenizer(), {}, {}))
    assert not path.exists()


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    edit_header(tmp_path, lambda header: header.update(tokenizer={"alphabet": "abc"}))
    with pytest.raises(ValueError, match="tokenizer: expected 28 tokens, got 3"):
        load_checkpoint(tmp_path)


def edit_header(folder, change, **settings) -> dict:
    """A checkpoint in `folder` whose header went through `change`; settings: of its config."""
    from safetensors import safe_open

    path = folder / "model.safetensors"
    save_checkpoint(path, Checkpoint(small(**settings), CharTokenizer(), {}, {}))
    with safe_open(str(path), "pt") as file:
        header = json.loads(file.metadata()["asrkit"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header)
    save_file(weights, path, metadata={"asrkit": json.dumps(header)})
    return header


def test_a_loaded_model_has_let_go_of_its_file(tmp_path):
    path = tmp_path / "model.safetensors"
    model = small()
    save_checkpoint(path, Checkpoint(model, CharTokenizer(), {}, {}))
    loaded = load_checkpoint(path).model
    with path.open("r+b") as file:  # in place, as a copy over it would be
        file.write(bytes(path.stat().st_size))
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
        assert loaded.state_dict()[name].data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_come_in_the_dtype_asked_for(tmp_path, dtype):
    model = small(encoder=FastConformerConfig(width=16, layers=1, heads=2))
    save_checkpoint(
        tmp_path / "model.safetensors", Checkpoint(model, CharTokenizer(), {}, {})
    )
    loaded = load_checkpoint(tmp_path, dtype=dtype).model
    counter = "encoder.blocks.0.batch_norm.num_batches_tracked"
    for name, value in model.state_dict().items():
        assert torch.equal(
            loaded.state_dict()[name], value if name == counter else value.to(dtype)
        ), name
    with pytest.raises(
        ValueError, match="^dtype: expected a floating-point dtype, got torch.int8.$"
    ):
        load_checkpoint(tmp_path, dtype=torch.int8)


FULL = """
import resource, sys
from asrkit.models import load_checkpoint, save_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
save_checkpoint(sys.argv[1], load_checkpoint(sys.argv[1]))
"""


def test_a_full_disk_is_said_and_the_file_that_was_there_stays(tmp_path):
    pytest.importorskip("resource")
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, Checkpoint(small(), CharTokenizer(), {}, {}))
    before = path.read_bytes()
    command = [sys.executable, "-c", FULL, str(path)]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    assert f"OSError: {path} cannot be written. Is the disk full? (" in said
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_what_would_not_load_is_not_saved(tmp_path):
    for tokenizer, features, message in [
        (CharTokenizer("abc"), {}, "^tokenizer: expected 28 tokens, got 3"),
        (CharTokenizer(), {"bins": 40}, "^features: expected 80 bins"),
        (
            CharTokenizer(),
            {"mels": 80},
            "^features: expected settings of FeatureConfig, got .'mels'",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            save_checkpoint(
                tmp_path / "model.safetensors",
                Checkpoint(small(), tokenizer, features, {}),
            )
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("damage", [
    lambda header: header.update(tokenizer="char"),
    lambda header: header.update(tokenizer={"model": "no hex"}),
    lambda header: header["features"].update(rate_hz=16_000.5),
    lambda header: header["model"].update(dropout="x"),
    lambda header: header["model"].update(encoder=dict(header["model"])),
], ids="path,digits,rate,dropout,kind".split(","))  # fmt: skip
def test_a_value_of_another_type_is_refused_in_one_line(tmp_path, damage):
    edit_header(tmp_path, damage)
    with pytest.raises(ValueError) as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)
    assert re.search("expected|model.safetensors is damaged", str(caught.value))


def test_weights_that_are_no_floating_point_numbers_are_refused(tmp_path):
    save_checkpoint(
        tmp_path / "model.safetensors", Checkpoint(small(), CharTokenizer(), {}, {})
    )
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        weights, header = (
            {name: file.get_tensor(name) for name in file.keys()},  # noqa: SIM118 - no dict, and not iterable
            file.metadata(),
        )
    weights["output.bias"] = weights["output.bias"].long()
    save_file(weights, tmp_path / "model.safetensors", metadata=header)
    with pytest.raises(
        ValueError,
        match="^output.bias: expected floating-point weights, whole counters, got torch.int64",
    ):
        load_checkpoint(tmp_path)


def test_making_a_model_to_load_does_not_import_torchs_compiler_which_takes_seconds():
    script = (
        "import sys, torch; from asrkit.models.presets import make_model, whisper_tiny, parakeet_rnnt_0_6b, tiny_aed\n"
        "with torch.device('meta'): make_model(whisper_tiny()), make_model(parakeet_rnnt_0_6b()), make_model(tiny_aed())\n"
        "print([name for name in sys.modules if name.startswith('torch._dynamo')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
