"""NeMo's archives: what is read from them, and what is refused in a line. Their numbers are compared in test_parity.py."""

import contextlib
import copy
import io
import json
import random
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import yaml

from asrkit.features import FeatureConfig, mel_bands
from asrkit.models import CTCModel, load_checkpoint, save_checkpoint
from asrkit.text import CharTokenizer, SentencePieceTokenizer

HERE = Path(__file__).parent
sys.path.append(str(HERE))
import parity_cases as known  # noqa: E402

TINY = known.golden_cases()
KINDS = {**TINY, "hybrid": TINY["tdt"] | {"kind": "hybrid"}}
BUFFERS = "preprocessor.featurizer."


def weights_of(kind):
    """Weights of an archive: those of tests/golden, and a CTC head for a hybrid."""
    golden = json.loads((HERE.parent / "golden/nemo.json").read_text())
    shapes = golden["tdt" if kind == "hybrid" else kind]["shapes"]
    if kind == "hybrid":
        head = golden["ctc"]["shapes"]
        shapes |= {
            f"ctc_{name}": head[name] for name in head if name.startswith("decoder.")
        }
    states = {name: torch.zeros(shape) for name, shape in shapes.items()}
    states[f"{BUFFERS}window"] = torch.hann_window(400, periodic=False)
    states[f"{BUFFERS}fb"] = mel_bands(FeatureConfig()).T[None]
    return known.fill(states)


def archive(path, kind="ctc", weights=None, mode="w", **changes):
    """An archive whose config has other values at keys; sections are apart by "__"."""
    config = known.nemo_config(KINDS[kind])
    for key, value in changes.items():
        *sections, last = key.split("__")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = copy.deepcopy(value)
    known.write_nemo(path, config, weights or weights_of(kind), mode)
    return path


def refused(path, said):
    """Loading is refused in one short line."""
    with pytest.raises(ValueError, match=said) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_becomes_the_model_of_its_config_and_so_does_its_copy(
    kind, tmp_path
):
    how = known.ENCODER | KINDS[kind]
    loaded = load_checkpoint(archive(tmp_path / "a.nemo", kind))
    encoder = loaded.model.config.encoder
    sizes = (encoder.width, encoder.layers, encoder.heads, encoder.subsampling_channels)
    assert sizes == (how["width"], how["layers"], how["heads"], how["channels"])
    assert (encoder.bias, encoder.scale_input) == (how["bias"], how["scale"])
    assert isinstance(loaded.model, CTCModel) == (kind == "ctc")
    if kind != "ctc":
        assert loaded.model.durations == tuple(how["durations"])
        assert (loaded.model.ctc_head is not None) == (kind == "hybrid")
        assert loaded.notes["max_symbols"] == 10
    assert loaded.tokenizer == SentencePieceTokenizer(known.sentencepiece_model())
    assert FeatureConfig(**loaded.features) == FeatureConfig()
    save_checkpoint(tmp_path / "b.safetensors", loaded)
    again = load_checkpoint(tmp_path / "b.safetensors")
    assert again[1:] == loaded[1:]
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


@pytest.mark.parametrize(
    "greedy, most",
    [(None, 10), ({"max_symbols": 3}, 3), ({"max_symbols_per_step": 30}, 30)],
)
def test_how_many_labels_a_frame_may_have_is_read(greedy, most, tmp_path):
    path = archive(tmp_path / "a.nemo", "tdt", decoding__greedy=greedy)
    assert load_checkpoint(path).notes["max_symbols"] == most


def test_gzip_archives_and_other_numbers_for_the_joint_are_read_alike(tmp_path):
    weights = weights_of("rnnt")
    other = {
        name.replace("joint_net.2", "joint_net.1"): weights[name] for name in weights
    }
    for path in (
        archive(tmp_path / "a.nemo", "rnnt", mode="w:gz"),
        archive(tmp_path / "b.nemo", "rnnt", other),
    ):
        output = load_checkpoint(path).model.output.weight
        assert torch.equal(output, weights["joint.joint_net.2.weight"])


def test_weights_come_in_the_dtype_asked_for_and_counters_stay_whole(tmp_path):
    model = load_checkpoint(
        archive(tmp_path / "a.nemo", "hybrid"), dtype=torch.bfloat16
    ).model
    for name, value in model.state_dict().items():
        counts = name.endswith("num_batches_tracked")
        assert value.dtype == (torch.int64 if counts else torch.bfloat16), name


@pytest.mark.parametrize("name", ["hann", "hamming", "blackman"])
def test_windows_are_named_and_never_periodic(name, tmp_path):
    make = getattr(torch, f"{name}_window")
    weights = weights_of("ctc") | {f"{BUFFERS}window": make(400, periodic=False)}
    path = archive(tmp_path / "a.nemo", weights=weights, preprocessor__window=name)
    config = FeatureConfig(**load_checkpoint(path).features)
    assert (config.window, config.periodic) == (name, False)


def test_settings_of_features_are_read(tmp_path):
    path = archive(
        tmp_path / "a.nemo", preprocessor__normalize="NA", preprocessor__preemph=None,
        preprocessor__log_zero_guard_type="clamp", preprocessor__log_zero_guard_value="1e-5",
        preprocessor__mag_power=1.0, preprocessor__pad_to=16,
    )  # fmt: skip
    assert FeatureConfig(**load_checkpoint(path).features) == FeatureConfig(
        normalization="none", preemphasis=0.0, guard="clamp", log_guard=1e-5, power=1
    )


def test_models_of_characters_take_their_labels_as_tokenizer(tmp_path):
    labels = [*" abcdefghijklmnopqrstuvwxyz'?.,:"][: known.V]
    named = {
        "labels": labels,
        "target": "x.EncDecCTCModel",
        "decoder__vocabulary": "${labels}",
    }
    loaded = load_checkpoint(archive(tmp_path / "a.nemo", **named))
    assert loaded.tokenizer == CharTokenizer("".join(labels))
    named["labels"] = ["ab"] * known.V
    refused(archive(tmp_path / "b.nemo", **named), "size mismatch for output.weight")


def test_references_to_other_keys_are_followed_and_circles_are_not(tmp_path):
    path = archive(
        tmp_path / "a.nemo", "tdt", model_defaults={"width": 16, "w": "${model_defaults.width}"},
        encoder__d_model="${model_defaults.w}", two=2, decoding__durations=[0, 1, "${two}", 3, 4],
        optim="${no.such.key}",
    )  # fmt: skip
    model = load_checkpoint(path).model
    assert model.config.encoder.width == 16
    assert model.durations == (0, 1, 2, 3, 4)
    path = archive(tmp_path / "b.nemo", a="${b}", b="${a}", encoder__d_model="${a}")
    refused(path, "^model: b.nemo is damaged .RecursionError")


BOMB = "a0: &a0 [1]\n"  # 9 ** 9 values
for n in range(1, 10):
    BOMB += f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n"


def with_yaml(path, text, width="16"):
    """An archive whose config begins with `text`, has `width`, and a dangling link beside it."""
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
def test_what_stands_in_other_sections_and_members_does_not_matter(text, tmp_path):
    load_checkpoint(with_yaml(tmp_path / "a.nemo", text))


def test_aliases_that_make_billions_of_values_are_refused(tmp_path):
    refused(
        with_yaml(tmp_path / "a.nemo", BOMB, "*a9"),
        "^model_config.yaml: expected at most 1000000 values",
    )


def test_settings_that_say_what_is_so_anyway_are_read(tmp_path):
    weights = weights_of("ctc")
    for name in (f"{BUFFERS}window", f"{BUFFERS}fb"):
        weights[name] = weights[name].bfloat16()
    path = archive(
        tmp_path / "a.nemo",
        weights=weights,
        preprocessor__highfreq=8000,
        encoder__conv_context_size=[4, 4],
    )
    load_checkpoint(path)


def test_local_attention_is_read_where_its_sides_are_equal(tmp_path):
    local = {"encoder__self_attention_model": "rel_pos_local_attn"}
    path = archive(tmp_path / "a.nemo", encoder__att_context_size=[8, 8], **local)
    assert load_checkpoint(path).model.config.encoder.context == (8, 8)
    path = archive(tmp_path / "b.nemo", encoder__att_context_size=[8, 4], **local)
    refused(path, "^encoder.att_context_size: expected equal sides of local attention")


CONFIG = [
    ({"target": "x.EncDecClassificationModel"}, "^target: expected one of .*, got 'EncDecClassificationModel'"),
    ({"preprocessor": 3}, "^model: a.nemo is damaged .AttributeError"),
    ({"preprocessor__log": False}, "^preprocessor.log: expected True, got False. Other values are not"),
    ({"preprocessor__frame_splicing": 3}, "^preprocessor.frame_splicing: expected 1"),
    ({"preprocessor__sample_rate": "fast"}, "^model: a.nemo is damaged .TypeError"),
    ({"preprocessor__mag_power": 1.5}, "^power: expected one of 1, 2, got 1.5"),
    ({"preprocessor__pad_value": 1.0}, "^preprocessor.pad_value: expected 0"),
    ({"preprocessor__normalize": {"fixed_mean": [0]}}, "^normalization: expected one of"),
    ({"preprocessor__features": 64}, "^preprocessor.featurizer.fb: expected .*Slaney's mel bands .*, got other numbers, of shape .1, 80, 257"),
    ({"preprocessor__window_size": 0.02}, "^preprocessor.featurizer.window: expected a hann window, .* of shape .400"),
    ({"preprocessor__log_zero_guard_value": "x"}, "^model: a.nemo is damaged .ValueError: could not convert"),
    ({"encoder__causal_downsampling": True}, "^encoder.causal_downsampling: expected False"),
    ({"encoder__global_tokens": 1}, "^encoder.global_tokens: expected 0, got 1"),
    ({"encoder__att_context_style": "chunked_limited"}, "^encoder.att_context_style: expected 'regular'"),
    ({"encoder__att_context_size": [[70, 13], [70, 6]]}, "^context: expected"),
    ({"encoder__att_context_size": [8, 4, 2]}, "^context: expected .left, right. in encoder frames"),
    ({"encoder__conv_context_size": "causal"}, "^encoder.conv_context_size: expected .4, 4., got 'causal'"),
    ({"encoder__d_model": "???"}, "^width: expected a whole number, got '???'".replace("?", "[?]")),
    ({"encoder__n_layers": 10**9}, "^model: expected at most .* layers, the number of its tensors, got 1000000000"),
    ({"encoder__n_heads": 3}, "^heads: expected a divisor of width=16, got 3"),
    ({"tokenizer__type": "wpe"}, "^tokenizer.type: expected 'bpe', got 'wpe'"),
    ({"tokenizer__model_path": "nemo:b"}, "^model: a.nemo is damaged .it has no 'b'"),
]  # fmt: skip


@pytest.mark.parametrize(
    "changes, said", CONFIG, ids=[next(iter(one)) for one, _ in CONFIG]
)
def test_a_config_that_asrkit_does_not_compute_is_refused(changes, said, tmp_path):
    refused(archive(tmp_path / "a.nemo", **changes), said)


NORM = "encoder.layers.0.conv.batch_norm."
WEIGHTS = [
    ({"encoder.layers.0.adapter.x": torch.zeros(1)}, "Unexpected key.*encoder.blocks.0.adapter.x"),
    ({"encoder.layers.1.norm_out.bias": None}, "^a.nemo: the weights are not of its config .Missing key.*encoder.blocks.1.final_norm.bias"),
    ({"encoder.layers.1.self_attn.linear_k.bias": None}, "^model: a.nemo is damaged .it has no 'encoder.blocks.1.attention.k.bias'"),
    ({"encoder.layers.0.self_attn.pos_bias_u": torch.zeros(())}, "^model: a.nemo is damaged .IndexError"),
    ({"decoder.decoder_layers.0.bias": torch.zeros(9)}, "size mismatch for output.bias"),
    ({"joint.joint_net.2.bias": torch.zeros(9)}, "^model: expected weights of one model, got two for output.bias"),
    ({"x": 1}, "^x: expected a dense tensor, got int"),
    ({"x": torch.eye(2).to_sparse()}, "^x: expected a dense tensor, got torch.sparse_coo"),
    ({"decoder.decoder_layers.0.bias": torch.zeros(32).cfloat()}, "^output.bias: expected floating-point weights, whole counters, got torch.complex64"),
    ({f"{NORM}num_batches_tracked": torch.tensor(1).cfloat()}, "batch_norm.num_batches_tracked: expected .* got torch.complex64"),
    ({f"{NORM}running_mean": torch.zeros(16).long()}, "batch_norm.running_mean: expected .* got torch.int64"),
    ({f"{BUFFERS}window": torch.hann_window(400)}, "^preprocessor.featurizer.window: expected a hann window, not periodic, .* got other"),
    ({f"{BUFFERS}fb": 1.001 * mel_bands(FeatureConfig()).T[None]}, "^preprocessor.featurizer.fb: expected .*Slaney's mel bands up to rate / 2, got other"),
    ({f"{BUFFERS}fb": None}, "^model: a.nemo is damaged .it has no 'preprocessor.featurizer.fb'"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "changes, said", WEIGHTS, ids=[next(iter(one)) for one, _ in WEIGHTS]
)
def test_weights_that_are_missing_unknown_or_others_are_named(changes, said, tmp_path):
    weights = weights_of("ctc") | changes
    kept = {name: value for name, value in weights.items() if value is not None}
    refused(archive(tmp_path / "a.nemo", weights=kept), said)


class Code:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_code_does_not_run(tmp_path):
    weights = {"x": Code(tmp_path / "ran")}
    refused(
        archive(tmp_path / "a.nemo", weights=weights),
        "cannot be read as tensors alone .*Unsupported",
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_cut_anywhere_or_with_damaged_bytes_is_refused_or_read(
    mode, tmp_path
):
    whole = archive(tmp_path / "a.nemo", mode=mode).read_bytes()
    damaged, draw = tmp_path / "b.nemo", random.Random(0)
    for cut in (0, 100, 600, *(draw.randrange(len(whole) - 10_240) for _ in range(8))):
        damaged.write_bytes(whole[:cut])
        refused(damaged, "^model: b.nemo is damaged .it is no whole tar archive: ")
    for _ in range(15):
        changed = bytearray(whole)
        for _ in range(20):
            changed[draw.randrange(len(whole))] = draw.randrange(256)
        damaged.write_bytes(changed)
        with contextlib.suppress(ValueError):  # damaged numbers are numbers
            load_checkpoint(damaged)


ODD = (
    "x",
    -1,
    0,
    10**9,
    None,
    [],
    {},
    [[1]],
    float("nan"),
    True,
    "1e5",
    {"a": 1},
    b"x",
    "${encoder}",
)


def test_odd_values_anywhere_in_the_config_are_refused_in_one_line_or_taken(tmp_path):
    draw, weights = random.Random(0), weights_of("hybrid")
    config = known.nemo_config(KINDS["hybrid"])
    sections = ("preprocessor", "encoder", "decoder", "joint", "decoding", "tokenizer")
    keys = [f"{name}__{key}" for name in sections for key in config[name]]
    for key in draw.sample(keys, 40):
        value = draw.choice(ODD)
        said = ""
        try:
            load_checkpoint(
                archive(tmp_path / "a.nemo", "hybrid", weights, **{key: value})
            )
        except ValueError as error:
            said = str(error)
        assert "\n" not in said, (key, value)
        assert len(said) < 900, (key, value)


def test_weights_that_share_memory_become_weights_of_their_own(tmp_path):
    weights = weights_of("rnnt")
    flat = torch.cat(
        [value.flatten() for name, value in weights.items() if ".lstm." in name]
    )
    for name, value in weights.items():
        if ".lstm." in name:  # as cuDNN lays them out
            weights[name], flat = (
                flat[: value.numel()].view(value.shape),
                flat[value.numel() :],
            )
    tied = "encoder.layers.{}.self_attn.pos_bias_u"
    weights[tied.format(1)] = weights[tied.format(0)]
    loaded = load_checkpoint(archive(tmp_path / "a.nemo", "rnnt", weights))
    values = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert len({value.untyped_storage().data_ptr() for value in values}) == len(values)
    save_checkpoint(tmp_path / "b.safetensors", loaded)
