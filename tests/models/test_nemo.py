"""NeMo's archives: what is read from them, and what is refused in one line. Their numbers are compared in test_parity.py."""

import io
import random
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import yaml

from asrkit.features import FeatureConfig
from asrkit.models import CTCModel, FastConformerConfig, load_checkpoint
from asrkit.text import CharTokenizer, SentencePieceTokenizer

sys.path.append(str(Path(__file__).parent))
import parity_cases as known
from published import (
    GONE,
    changed,
    expect_a_copy_to_be_the_same,
    featurizer,
    golden,
    refused,
    without_gone,
    zeros,
)

TINY = known.golden_cases()
KINDS = {**TINY, "hybrid": TINY["tdt"] | {"kind": "hybrid"}}
BUFFERS = "preprocessor.featurizer."


def weights_of(kind):
    """Weights of an archive: those of tests/golden, and a CTC head for a hybrid."""
    shapes = golden("nemo")["tdt" if kind == "hybrid" else kind]["shapes"]
    if kind == "hybrid":
        head = golden("nemo")["ctc"]["shapes"]
        decoder = "decoder.decoder_layers.0."
        shapes |= {f"ctc_{name}": head[name] for name in head if decoder in name}
    states = zeros(shapes)
    config = known.nemo_config(KINDS[kind])
    return known.fill(states | featurizer(config["preprocessor"]))


def archive(path, kind="ctc", changes=None, weights=None, mode="w"):
    """An archive with changes of its config, at dotted keys, and of its weights."""
    config = changed(known.nemo_config(KINDS[kind]), changes or {})
    kept = without_gone(weights_of(kind) | (weights or {}))
    return known.write_nemo(path, config, kept, mode)


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_becomes_the_model_of_its_config_and_so_does_its_copy(
    kind, tmp_path
):
    how = known.ENCODER | KINDS[kind]
    loaded = load_checkpoint(archive(tmp_path / "a.nemo", kind))
    assert loaded.model.config.encoder == FastConformerConfig(
        width=16, layers=2, heads=2, subsampling_channels=4, bias=how["bias"],
        scale_input=how["scale"], dropout_attention=0.1, dropout_input=0.1,
    )  # fmt: skip
    assert isinstance(loaded.model, CTCModel) == (kind == "ctc")
    if kind != "ctc":
        assert loaded.model.durations == tuple(how["durations"])
        assert (loaded.model.ctc_head is not None) == (kind == "hybrid")
        assert loaded.notes["max_symbols"] == 10
    assert loaded.tokenizer == SentencePieceTokenizer(known.sentencepiece_model())
    assert FeatureConfig(**loaded.features) == FeatureConfig()
    expect_a_copy_to_be_the_same(loaded, tmp_path)


@pytest.mark.parametrize(
    "greedy, most",
    [(None, 10), ({"max_symbols": 3}, 3), ({"max_symbols_per_step": 30}, 30)],
)
def test_the_limit_of_labels_per_frame_is_read(greedy, most, tmp_path):
    path = archive(tmp_path / "a.nemo", "tdt", {"decoding.greedy": greedy})
    assert load_checkpoint(path).notes["max_symbols"] == most


def test_gzip_archives_and_other_numbers_for_the_joint_are_read_alike(tmp_path):
    weights = weights_of("rnnt")
    other = {}
    for name in (name for name in weights if "joint_net.2" in name):
        other |= {name: GONE, name.replace("net.2", "net.1"): weights[name]}
    for path in (
        archive(tmp_path / "a.nemo", "rnnt", mode="w:gz"),
        archive(tmp_path / "b.nemo", "rnnt", weights=other),
    ):
        output = load_checkpoint(path).model.output.weight
        assert torch.equal(output, weights["joint.joint_net.2.weight"])


def test_settings_of_features_are_read(tmp_path):
    settings = {
        "normalize": "NA", "preemph": None, "log_zero_guard_type": "clamp", "log_zero_guard_value": "1e-5",
        "mag_power": 1.0, "pad_to": 16, "highfreq": 8000,
    }  # fmt: skip
    changes = {f"preprocessor.{key}": value for key, value in settings.items()}
    window = {f"{BUFFERS}window": torch.hann_window(400, periodic=False).bfloat16()}
    loaded = load_checkpoint(archive(tmp_path / "a.nemo", "ctc", changes, window))
    assert FeatureConfig(**loaded.features) == FeatureConfig(
        normalization="none", preemphasis=0.0, guard="clamp", log_guard=1e-5, power=1
    )


def test_models_of_characters_take_their_labels_as_tokenizer(tmp_path):
    labels = [*" abcdefghijklmnopqrstuvwxyz'?.,:"][: known.V]
    vocabulary = {"labels": labels, "decoder.vocabulary": "${labels}"}
    named = vocabulary | {"target": "x.EncDecCTCModel"}
    loaded = load_checkpoint(archive(tmp_path / "a.nemo", "ctc", named))
    assert loaded.tokenizer == CharTokenizer("".join(labels))


def test_references_to_other_keys_are_resolved_and_circles_are_refused(tmp_path):
    followed = {
        "model_defaults": {"width": 16, "w": "${model_defaults.width}"}, "two": 2, "optim": "${no.such.key}",
        "encoder.d_model": "${model_defaults.w}", "decoding.durations": [0, 1, "${two}", 3, 4],
    }  # fmt: skip
    model = load_checkpoint(archive(tmp_path / "a.nemo", "tdt", followed)).model
    assert model.config.encoder.width == 16
    assert model.durations == (0, 1, 2, 3, 4)
    circle = {"a": "${b}", "b": "${a}", "encoder.d_model": "${a}"}
    path = archive(tmp_path / "b.nemo", "ctc", circle)
    refused(path, "model: b.nemo is damaged (RecursionError")


BOMB = "a0: &a0 [1]\n"  # 9 ** 9 values
for n in range(1, 10):
    BOMB += f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n"


def with_yaml(path, text, width="16"):
    """An archive whose config begins with `text`, has `width`, and which has a dangling link."""
    config = yaml.safe_dump(known.nemo_config(KINDS["ctc"]))
    config = config.replace("d_model: 16", f"d_model: {width}")
    with tarfile.open(archive(path.with_suffix(".whole"))) as whole:
        files = {m.name: whole.extractfile(m).read() for m in whole}
    files["./model_config.yaml"] = (text + config).encode()
    with tarfile.open(path, "w") as tar:
        odd = tarfile.TarInfo("./odd")
        odd.type, odd.linkname = tarfile.SYMTYPE, "missing"
        tar.addfile(odd)
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("text", ["a: ${a}\n", "a: &a [*a]\n", BOMB])
def test_other_sections_and_members_do_not_matter(text, tmp_path):
    load_checkpoint(with_yaml(tmp_path / "a.nemo", text))


def test_aliases_that_make_billions_of_values_and_deep_nesting_are_refused(tmp_path):
    path = with_yaml(tmp_path / "a.nemo", BOMB, "*a9")
    refused(path, "model_config.yaml: expected at most 1000000 values")
    path = with_yaml(tmp_path / "b.nemo", "a: " + "[" * 200_000)
    refused(path, "model: b.nemo is damaged (RecursionError")


LOCAL = {
    "encoder.self_attention_model": "rel_pos_local_attn",
    "encoder.att_context_size": [8, 4],
}
CONFIG = [
    ({"target": "x.EncDecClassificationModel"}, "target: expected one of ["),
    ({"preprocessor": 3}, "model: a.nemo is damaged (AttributeError"),
    ({"preprocessor.frame_splicing": 3}, "preprocessor.frame_splicing: expected 1, got 3. Other values are not"),
    ({"preprocessor.mag_power": 1.5}, "power: expected one of 1, 2, got 1.5"),
    ({"preprocessor.features": 64}, "preprocessor.featurizer.fb: expected a hann window, not periodic, and Slaney's mel bands"),
    ({"preprocessor.window_size": 0.02}, "preprocessor.featurizer.window: expected a hann window"),
    ({"encoder.causal_downsampling": True}, "encoder.causal_downsampling: expected False"),
    ({"encoder.att_context_style": "chunked_limited"}, "encoder.att_context_style: expected 'regular'"),
    ({"encoder.att_context_size": [[70, 13], [70, 6]]}, "context: expected (left, right) in encoder frames"),
    (LOCAL, "encoder.att_context_size: expected equal sides of local attention"),
    ({"encoder.conv_context_size": "causal"}, "encoder.conv_context_size: expected [4, 4], got 'causal'"),
    ({"encoder.d_model": "???"}, "width: expected a whole number, got '???'"),
    ({"encoder.n_layers": 10**9}, "layers, the number of its tensors, got 1000000000"),
    ({"tokenizer.type": "wpe"}, "tokenizer.type: expected 'bpe', got 'wpe'"),
    ({"tokenizer.model_path": "nemo:b"}, "model: a.nemo is damaged (it has no 'b'"),
]  # fmt: skip
NORM = "encoder.layers.0.conv.batch_norm."
BIAS = "decoder.decoder_layers.0.bias"
WEIGHTS = [
    ({"encoder.layers.0.adapter.x": torch.zeros(1)}, 'Unexpected key(s) in state_dict: "encoder.blocks.0.adapter.x"'),
    ({"encoder.layers.1.norm_out.bias": GONE}, "a.nemo: the weights do not fit its config (Missing key"),
    ({"encoder.layers.1.self_attn.linear_k.bias": GONE}, "it has no 'encoder.blocks.1.attention.k.bias'"),
    ({BIAS: torch.zeros(9)}, "size mismatch for output.bias"),
    ({"joint.joint_net.2.bias": torch.zeros(9)}, "model: expected weights of one model, got two for output.bias"),
    ({"x": 1}, "x: expected a dense tensor, got int"),
    ({BIAS: torch.zeros(32).cfloat()}, "output.bias: expected floating-point weights, whole counters, got torch.complex64"),
    ({f"{NORM}running_mean": torch.zeros(16).long()}, "batch_norm.running_mean: expected floating-point weights"),
    ({f"{BUFFERS}window": torch.hann_window(400)}, "preprocessor.featurizer.window: expected a hann window, not periodic"),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", CONFIG)
def test_an_unsupported_config_is_refused(changes, message, tmp_path):
    refused(archive(tmp_path / "a.nemo", "ctc", changes), message)


@pytest.mark.parametrize("weights, message", WEIGHTS)
def test_weights_that_are_missing_or_others_are_named(weights, message, tmp_path):
    refused(archive(tmp_path / "a.nemo", weights=weights), message)


class Code:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_code_does_not_run(tmp_path):
    path = archive(tmp_path / "a.nemo", weights={"x": Code(tmp_path / "ran")})
    refused(path, "cannot be read as tensors alone (Unsupported")
    assert not (tmp_path / "ran").exists()


ODD = ("x", -1, 0, 10**9, None, [], {}, [[1]], float("nan"), True, "1e5", b"x", "${encoder}")  # fmt: skip


def test_odd_values_anywhere_in_the_config_are_refused_in_one_line_or_taken(tmp_path):
    draw = random.Random(0)
    config = known.nemo_config(KINDS["hybrid"])
    sections = ("preprocessor", "encoder", "decoder", "joint", "decoding", "tokenizer")
    keys = [f"{name}.{key}" for name in sections for key in config[name]]
    for key in draw.sample(keys, 30):
        odd = {key: draw.choice(ODD)}
        path = archive(tmp_path / "a.nemo", "hybrid", odd)
        text = ""
        try:
            load_checkpoint(path)
        except ValueError as error:
            text = str(error)
        assert "\n" not in text, odd
        assert len(text) < 900, odd


def test_weights_that_share_memory_are_copied(tmp_path):
    weights = weights_of("rnnt")
    lstm = {name: value for name, value in weights.items() if ".lstm." in name}
    flat = torch.cat([value.flatten() for value in lstm.values()])
    parts = flat.split([value.numel() for value in lstm.values()])  # as cuDNN has them
    shared = {
        name: part.view_as(lstm[name]) for name, part in zip(lstm, parts, strict=True)
    }
    tied = "encoder.layers.{}.self_attn.pos_bias_u"
    shared[tied.format(1)] = weights[tied.format(0)]
    loaded = load_checkpoint(archive(tmp_path / "a.nemo", "rnnt", weights=shared))
    values = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert len({value.untyped_storage().data_ptr() for value in values}) == len(values)
    expect_a_copy_to_be_the_same(loaded, tmp_path)
