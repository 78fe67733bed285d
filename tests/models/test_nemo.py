import contextlib
import copy
import io
import random
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import yaml

from asrkit.decoders import ctc_greedy, transducer_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import (
    CTCConfig,
    CTCModel,
    FastConformerConfig,
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
    load_checkpoint,
    save_checkpoint,
)
from asrkit.text import CharTokenizer, SentencePieceTokenizer

sys.path.append(str(Path(__file__).parent))
from parity_cases import ENCODER, V, nemo_config, speech

KINDS = {
    "ctc": {"kind": "ctc"},
    "rnnt": {
        "kind": "rnnt",
        "lstm": 2,
        "durations": [],
        "bins": 128,
        "bias": False,
        "scale": False,
    },
    "tdt": {
        "kind": "tdt",
        "lstm": 1,
        "durations": [0, 1, 2, 4],
        "subsampling": 4,
        "context": [6, 3],
    },
    "hybrid": {"kind": "hybrid", "lstm": 1, "durations": [0, 1, 2, 3, 4]},
}
BLOCK = {  # of a layer: NeMo's name -> asrkit's
    "norm_feed_forward1": "feed.0.0", "feed_forward1.linear1": "feed.0.1", "feed_forward1.linear2": "feed.0.4",
    "norm_feed_forward2": "feed.1.0", "feed_forward2.linear1": "feed.1.1", "feed_forward2.linear2": "feed.1.4",
    "norm_self_att": "attention_norm", "self_attn.linear_out": "attention.out", "self_attn.linear_pos": "attention.position",
    "norm_conv": "conv_norm", "conv.pointwise_conv1": "gate", "conv.depthwise_conv": "depthwise",
    "conv.batch_norm": "batch_norm", "conv.pointwise_conv2": "pointwise", "norm_out": "final_norm",
}  # fmt: skip
REST = {
    "encoder.pre_encode.out": "encoder.subsampling.out", "encoder.pre_encode.conv.0": "encoder.subsampling.convs.0",
    "encoder.pre_encode.conv.2": "encoder.subsampling.convs.1.0", "encoder.pre_encode.conv.3": "encoder.subsampling.convs.1.1",
    "encoder.pre_encode.conv.5": "encoder.subsampling.convs.2.0", "encoder.pre_encode.conv.6": "encoder.subsampling.convs.2.1",
    "decoder.prediction.embed": "predictor.embedding", "decoder.prediction.dec_rnn.lstm": "predictor.lstm",
    "joint.enc": "encoder_projection", "joint.pred": "predictor_projection", "joint.joint_net.2": "output",
    "ctc_decoder.decoder_layers.0": "ctc_head",
}  # fmt: skip


def model_of(case: dict) -> TransducerModel | CTCModel:
    """The model that `nemo_config(case)` describes, built the other way: from asrkit's own config, with weights that differ."""
    how = ENCODER | case
    encoder = FastConformerConfig(
        bins=how["bins"], width=how["width"], layers=how["layers"], heads=how["heads"], subsampling=how["subsampling"],
        subsampling_channels=how["channels"], kernel=how["kernel"], bias=how["bias"], scale_input=how["scale"],
        context=tuple(how.get("context", (-1, -1))), dropout=0.1, dropout_attention=0.1, dropout_input=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    if case["kind"] == "ctc":
        model = CTCModel(CTCConfig(vocab_size=V, encoder=encoder))
    else:
        lstm = LSTMConfig(width=24, layers=case["lstm"])
        model = TransducerModel(TransducerConfig(
            vocab_size=V, encoder=encoder, predictor=lstm, joint_width=20, dropout=0.2, activation="relu",
            durations=case["durations"], ctc=case["kind"] == "hybrid",
        ))  # fmt: skip
        torch.nn.init.zeros_(model.predictor.embedding.weight[-1])
    for name, value in model.state_dict().items():
        if value.ndim == 1 or name.endswith("_bias"):
            value += 0.1 * torch.rand_like(
                value
            )  # biases, norms and their statistics are then no zeros and ones
    model.output.weight.data *= 4
    return model.eval()


def weights_of(model: TransducerModel | CTCModel) -> dict[str, torch.Tensor]:
    """Its weights as NeMo names and shapes them, with the features' buffers and what is no weight."""
    bins, found = model.config.encoder.bins, dict(model.state_dict())
    named = {
        "preprocessor.featurizer.window": torch.hann_window(400, periodic=False),
        "preprocessor.featurizer.fb": slaney(bins),
        "encoder.pos_enc.pe": torch.zeros(1, 9, 4),
    }
    rest = {"decoder.decoder_layers.0": "output", **REST} if isinstance(model, CTCModel) else REST
    for N in range(model.config.encoder.layers):
        theirs, ours = f"encoder.layers.{N}.", f"encoder.blocks.{N}."
        for leaf in ("weight", "bias"):
            if f"{ours}attention.qkv.{leaf}" in found:
                for letter, third in zip(
                    "qkv", found.pop(f"{ours}attention.qkv.{leaf}").chunk(3), strict=True
                ):
                    named[f"{theirs}self_attn.linear_{letter}.{leaf}"] = third.clone()
        named[f"{theirs}self_attn.pos_bias_u"] = found.pop(f"{ours}attention.content_bias")[:, 0]
        named[f"{theirs}self_attn.pos_bias_v"] = found.pop(f"{ours}attention.position_bias")[:, 0]
        rest = rest | {theirs + name: ours + other for name, other in BLOCK.items()}
    for theirs, ours in rest.items():
        for name in [name for name in found if name.startswith(f"{ours}.")]:
            value = found.pop(name)
            if name.endswith("weight") and any(
                part in theirs for part in ("pointwise_conv", "decoder_layers")
            ):
                value = value[..., None]
            named[theirs + name.removeprefix(ours)] = value
    assert not found
    return named


def slaney(bins: int) -> torch.Tensor:
    from torchaudio.functional import melscale_fbanks

    return melscale_fbanks(257, 0.0, 8000.0, bins, 16_000, "slaney", "slaney").T[None].contiguous()


TEXTS = [
    "the cat sat on the mat",
    "a dog had a bone",
    "she sells sea shells",
    "which pump jumps over five lazy boxes",
] * 5


@pytest.fixture(scope="module")
def pieces() -> SentencePieceTokenizer:
    return SentencePieceTokenizer.train(TEXTS, vocab_size=V)


@pytest.fixture(scope="module")
def parts(pieces):
    """Of each kind: the model, and the members of its archive."""
    assert pieces.vocab_size == V
    made = {}
    for name, case in KINDS.items():
        model, stored = model_of(case), io.BytesIO()
        torch.save(weights_of(model), stored)
        members = {
            "model_config.yaml": yaml.safe_dump(nemo_config(case), sort_keys=False).encode(),
            "model_weights.ckpt": stored.getvalue(), "0123_tokenizer.model": pieces.model, "0123_vocab.txt": b"a\nb",
        }  # fmt: skip
        made[name] = model, members
    return made


def pack(path: Path, members: dict[str, bytes], *extra: tarfile.TarInfo, mode: str = "w") -> Path:
    """A tar of a folder, as NeMo makes it: `members`, then headers without contents."""
    with tarfile.open(path, mode) as tar:
        folder = tarfile.TarInfo(".")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in members.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in extra:
            tar.addfile(member)
    return path


def changed(members: dict[str, bytes], *changes: tuple[str, object]) -> dict[str, bytes]:
    """`members` whose config has other values at dotted keys."""
    config = yaml.safe_load(members["model_config.yaml"])
    for key, value in changes:
        *sections, last = key.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = copy.deepcopy(value)
    return members | {"model_config.yaml": yaml.safe_dump(config).encode()}


def reweighted(members: dict[str, bytes], change) -> dict[str, bytes]:
    """`members` whose weights went through `change`, which may return others."""
    weights, stored = torch.load(io.BytesIO(members["model_weights.ckpt"])), io.BytesIO()
    replaced = change(weights)
    torch.save(weights if replaced is None else replaced, stored)
    return members | {"model_weights.ckpt": stored.getvalue()}


def refused(path: Path, match: str) -> None:
    """Loading is refused in one short line."""
    with pytest.raises(ValueError, match=match) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700, str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_becomes_the_model_it_was_made_of_and_so_does_its_copy_in_safetensors(
    kind, parts, pieces, tmp_path
):
    model, members = parts[kind]
    loaded = load_checkpoint(pack(tmp_path / "a.nemo", members))
    targets = {"ctc": "EncDecCTCModelBPE", "hybrid": "EncDecHybridRNNTCTCBPEModel"}
    assert (
        loaded.model.config == model.config
        and loaded.tokenizer == pieces
        and not loaded.model.training
    )
    assert loaded.notes["source"] == "a.nemo" and loaded.notes["target"] == targets.get(
        kind, "EncDecRNNTBPEModel"
    )
    save_checkpoint(tmp_path / "b.safetensors", loaded)
    again = load_checkpoint(tmp_path / "b.safetensors")
    assert again[1:] == loaded[1:]
    features, frames = log_mel(*speech((16_000, 9_999)), config=FeatureConfig(**loaded.features))
    wanted = decoded(model, features, frames)
    assert any(wanted.tokens())
    for one in (loaded, again):
        assert all(
            torch.equal(value, model.state_dict()[name])
            for name, value in one.model.state_dict().items()
        )
        assert decoded(one.model, features, frames).tokens() == wanted.tokens()


@torch.inference_mode()
def decoded(model, features, frames):
    if isinstance(model, CTCModel):
        return ctc_greedy(*model(features, frames))
    return transducer_greedy(model, *model.encode(features, frames)[:2])


@pytest.mark.parametrize("greedy, most", [
    (None, 10), ({"max_symbols": 3}, 3), ({"max_symbols_per_step": 4}, 4), ({"max_symbols": None, "max_symbols_per_step": 5}, 5),
])  # fmt: skip
def test_how_many_labels_a_frame_may_have_is_read(greedy, most, parts, tmp_path):
    path = pack(tmp_path / "a.nemo", changed(parts["tdt"][1], ("decoding.greedy", greedy)))
    assert load_checkpoint(path).notes["max_symbols"] == most


def test_gzip_archives_and_other_numbers_for_the_joint_are_read_alike(parts, tmp_path):
    model, members = parts["tdt"]

    def undropped(weights):
        return {
            name.replace("joint_net.2", "joint_net.1"): value for name, value in weights.items()
        }

    for path in (
        pack(tmp_path / "a.nemo", members, mode="w:gz"),
        pack(tmp_path / "b.nemo", reweighted(members, undropped)),
    ):
        assert torch.equal(load_checkpoint(path).model.output.weight, model.output.weight)


def test_weights_come_in_the_dtype_asked_for_and_counters_stay_whole(parts, tmp_path):
    model = load_checkpoint(
        pack(tmp_path / "a.nemo", parts["hybrid"][1]), dtype=torch.bfloat16
    ).model
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    counters = {name for name in dtypes if name.endswith("num_batches_tracked")}
    assert len(counters) == 2 and {dtypes[name] for name in counters} == {torch.int64}
    assert {dtypes[name] for name in dtypes.keys() - counters} == {torch.bfloat16}
    assert all(parameter.requires_grad for parameter in model.parameters())
    encoded, _, ctc = model.encode(torch.randn(1, 80, 80), torch.tensor([80]))
    assert (encoded.dtype, ctc.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    "name", ["model_config.yaml", "model_weights.ckpt", "0123_tokenizer.model"]
)
def test_a_missing_member_is_named(name, parts, tmp_path):
    members = {key: value for key, value in parts["rnnt"][1].items() if key != name}
    refused(pack(tmp_path / "a.nemo", members), f"a.nemo: expected a member '{name}', got")


def test_nothing_is_written_beside_the_archive_or_under_the_names_of_members(
    parts, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    load_checkpoint(pack(tmp_path / "a.nemo", parts["rnnt"][1], mode="w:gz"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.nemo"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_buffers_of_half_precision_are_those_of_their_settings(dtype, parts, tmp_path):
    members = parts["hybrid"][1]

    def halve(weights):
        for name in weights:
            if name.startswith("preprocessor."):
                weights[name] = weights[name].to(dtype)

    load_checkpoint(pack(tmp_path / "a.nemo", reweighted(members, halve)))


class Code:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_code_does_not_run(parts, tmp_path):
    members = reweighted(parts["rnnt"][1], lambda weights: {**weights, "x": Code(tmp_path / "ran")})
    refused(
        pack(tmp_path / "a.nemo", members),
        "a.nemo: model_weights.ckpt cannot be read as tensors alone .*Unsupported global.*by default",
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("change, said", [
    (lambda weights: [1], "dense tensors by name, got list"),
    (lambda weights: {"x": 1}, "dense tensors by name"),
    (lambda weights: {"x" * 10**4: torch.zeros(1)} | weights, "unknown in all"),
    (lambda weights: {"x": torch.eye(3).to_sparse()}, "tensors"),
], ids=["a list", "a number", "a long name", "sparse"])  # fmt: skip
def test_weights_that_are_no_plain_tensors_are_refused(change, said, parts, tmp_path):
    refused(pack(tmp_path / "a.nemo", reweighted(parts["ctc"][1], change)), said)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_cut_anywhere_or_with_damaged_bytes_is_refused_or_read_but_never_fails_otherwise(
    mode, parts, tmp_path
):
    whole = pack(tmp_path / "a.nemo", parts["ctc"][1], mode=mode).read_bytes()
    damaged, draw = tmp_path / "b.nemo", torch.Generator().manual_seed(0)
    last = (
        len(whole) - 10_240 if mode == "w" else len(whole)
    )  # a plain tar ends in zeros that nobody needs
    for cut in [0, 1, 100, 512, 600, *torch.randint(0, last, (12,), generator=draw).tolist()]:
        damaged.write_bytes(whole[:cut])
        refused(damaged, "b.nemo|member|config")
    for _ in range(25):
        at = torch.randint(0, len(whole), (20,), generator=draw).tolist()
        changed = bytearray(whole)
        for place in at:
            changed[place] ^= 1 + place % 255
        damaged.write_bytes(changed)
        with contextlib.suppress(ValueError):  # damaged numbers are numbers
            load_checkpoint(damaged)


@pytest.mark.parametrize("text, said", [
    (b"a: [", "model_config.yaml is damaged"),
    (b"\xff\xfe\xfa", "model_config.yaml is damaged"), (b"[1]", "keys and values, got list"),
    (b"[" * 5000, "model_config.yaml is damaged"), (b"a: !!python/object/apply:os.system [ls]", "model_config.yaml is damaged"),
    (b"target: x.EncDecClassificationModel", "target: expected one of .*, got 'EncDecClassificationModel'"),
    (b"a: 1", "target: expected one of"),
    (b"target: x.EncDecCTCModel", "config: expected a key 'preprocessor'"),
    (b"target: x.EncDecCTCModel\npreprocessor: 3", "config.preprocessor: expected a section, got 3"),
])  # fmt: skip
def test_a_config_that_is_none_is_refused(text, said, parts, tmp_path):
    refused(pack(tmp_path / "a.nemo", parts["ctc"][1] | {"model_config.yaml": text}), said)


ODD = [
    "x",
    -1,
    0,
    10**9,
    None,
    [],
    {},
    [[1]],
    [1, 2],
    float("inf"),
    float("nan"),
    True,
    "1e5",
    {"a": 1},
    3.5,
    b"x",
]
ODD += ["${encoder}", ["${encoder}"]]


def test_odd_values_anywhere_in_the_config_are_refused_in_one_line_or_taken(parts, tmp_path):
    members, draw = parts["hybrid"][1], random.Random(0)
    config = yaml.safe_load(members["model_config.yaml"])
    keys = [
        f"{name}.{key}"
        for name in ("preprocessor", "encoder", "decoder", "joint", "decoding")
        for key in config[name]
    ]
    keys += [f"decoder.prednet.{key}" for key in config["decoder"]["prednet"]] + [
        "tokenizer",
        "tokenizer.model_path",
        "aux_ctc",
    ]
    for _ in range(60):
        change = draw.choice(keys), draw.choice(ODD)
        try:
            load_checkpoint(pack(tmp_path / "a.nemo", changed(members, change)))
        except ValueError as error:
            said = str(error)
            if "\n" in said or len(said) > 500 or "whole tar" in said:
                pytest.fail(f"{change}: {said}")


UNSUPPORTED = [
    ("encoder._target_", "x.SqueezeformerEncoder"), ("encoder.subsampling", "striding"), ("encoder.causal_downsampling", True),
    ("encoder.conv_norm_type", "layer_norm"), ("encoder.self_attention_model", "abs_pos"), ("encoder.reduction", "pooling"),
    ("encoder.att_context_style", "chunked_limited"), ("encoder.att_context_size", [[70, 13], [70, 6]]),
    ("encoder.conv_context_size", "causal"), ("encoder.global_tokens", 1), ("encoder.feat_out", 7),
    ("encoder.n_layers", 10**9), ("encoder.d_model", "x"), ("preprocessor.window_size", 1e9),
    ("preprocessor.preemph", float("nan")), ("preprocessor.n_fft", 0), ("decoder.prednet.pred_rnn_layers", 10**9),
    ("encoder.subsampling_factor", 16), ("encoder.feat_in", 64), ("encoder.d_model", "???"), ("encoder.n_layers", "${oc.env:N}"),
    ("encoder.xscaling", "${no.such.key}"), ("preprocessor._target_", "x.AudioToMFCCPreprocessor"), ("preprocessor.log", False),
    ("preprocessor.frame_splicing", 3), ("preprocessor.window", "bartlett"), ("preprocessor.normalize", {"fixed_mean": [0]}),
    ("preprocessor.mag_power", 3), ("preprocessor.mel_norm", None), ("preprocessor.highfreq", 7000),
    ("preprocessor.exact_pad", True), ("preprocessor.log_zero_guard_type", "max"), ("preprocessor.window_size", 0.02999),
    ("preprocessor.log_zero_guard_value", "none"),
    ("preprocessor.pad_value", 1.0), ("decoder._target_", "x.StatelessTransducerDecoder"),
    ("decoder.blank_as_pad", False), ("decoder.normalization_mode", "layer"), ("decoder.prednet.rnn_hidden_size", 7),
    ("joint._target_", "x.HATJoint"), ("joint.log_softmax", False),
    ("joint.jointnet.activation", "sigmoid"),
    ("decoding.big_blank_durations", [2]), ("decoding.durations", [0, 1]), ("aux_ctc.decoder.add_blank", False),
    ("aux_ctc.decoder._target_", "x.ConvASRDecoderReconstruction"), ("tokenizer.type", "wpe"), ("tokenizer.type", "agg"),
    ("tokenizer.custom_tokenizer", {"_target_": "x"}), ("sample_rate", 8000),
]  # fmt: skip


@pytest.mark.parametrize(
    "key, value", UNSUPPORTED, ids=[f"{key}={value}" for key, value in UNSUPPORTED]
)
def test_what_asrkit_does_not_compute_is_refused_by_the_name_of_its_key(
    key, value, parts, tmp_path
):
    section, _, name = key.rpartition(".")
    said = f"^{section}.*{name}"
    refused(pack(tmp_path / "a.nemo", changed(parts["hybrid"][1], (key, value))), said)


def test_references_to_other_keys_are_followed_and_circles_are_not(parts, tmp_path):
    given = (
        "model_defaults",
        {
            "width": 32,
            "w": "${model_defaults.width}",
            "steps": [0, 1, "${model_defaults.two}"],
            "two": 2,
        },
    )
    members = changed(
        parts["hybrid"][1], given, ("encoder.d_model", "${model_defaults.w}"), ("encoder.feat_in", "${preprocessor.features}"),
        ("decoding.durations", [0, 1, "${model_defaults.two}", 3, 4]), ("optim", "${no.such.key}"),
    )  # fmt: skip
    model = load_checkpoint(pack(tmp_path / "a.nemo", members)).model
    assert model.config.encoder.width == 32 and model.durations == (0, 1, 2, 3, 4)
    members = changed(members, ("a", "${b}"), ("b", "${a}"), ("encoder.d_model", "${a}"))
    refused(pack(tmp_path / "b.nemo", members), "encoder.d_model")


@pytest.mark.parametrize("change, said", [
    (lambda w: w.update({"encoder.layers.0.adapter.x": torch.zeros(1)}), r"got \['encoder.layers.0.adapter.x'\], 1 unknown in all"),
    (lambda w: w.pop("encoder.layers.1.norm_out.bias"), r"missing \['encoder.blocks.1.final_norm.bias'\]"),
    (lambda w: w.pop("encoder.layers.1.self_attn.linear_k.bias"), "linear_q, linear_k and linear_v, got fewer"),
    (lambda w: w.update({"encoder.layers.1.self_attn.linear_k.bias": torch.zeros(())}), r"missing \['encoder.blocks.1.attention.qkv.bias'\]"),
    (lambda w: w.update({"encoder.layers.0.self_attn.pos_bias_u": torch.zeros(())}), r"content_bias \(\), not"),
    (lambda w: w.update({"decoder.prediction.embed.weight": torch.zeros(())}), r"predictor.embedding.weight \(\), not"),
    (lambda w: w.update({"joint.joint_net.1.bias": torch.zeros(1)}), "one output layer, got joint_net.1 and joint_net.2"),
    (lambda w: w.update({"joint.joint_net.2.bias": torch.zeros(9)}), r"output.bias \(9,\), not \(37,\)"),
    (lambda w: w["decoder.prediction.embed.weight"].fill_(1.0), "zeros for blank"),
    (lambda w: w.pop("preprocessor.featurizer.window"), "featurizer.window: expected a hann window of 400, got none"),
    (lambda w: w["preprocessor.featurizer.window"].mul_(1.0001), "featurizer.window: expected a hann window of 400"),
    (lambda w: w["preprocessor.featurizer.fb"].mul_(1.0003), r"featurizer.fb: expected Slaney's mel bands \(1, 80, 257\)"),
    (lambda w: {f"x{i}": v for i, v in enumerate(w.values())}, "unknown in all"),
])  # fmt: skip
def test_weights_that_are_missing_unknown_or_others_are_named(change, said, parts, tmp_path):
    def kept(found):
        other = change(found)
        return (
            {name: found[name] for name in found if "featurizer" in name} | other
            if isinstance(other, dict)
            else found
        )

    refused(pack(tmp_path / "a.nemo", reweighted(parts["hybrid"][1], kept)), said)


@pytest.mark.parametrize("name, make", [
    ("hann", torch.hann_window), ("hamming", torch.hamming_window), ("blackman", torch.blackman_window),
])  # fmt: skip
@pytest.mark.parametrize("periodic", [False, True])
def test_whether_the_window_is_periodic_is_read_from_its_numbers(
    name, make, periodic, parts, tmp_path
):
    def rewindowed(weights):
        weights["preprocessor.featurizer.window"] = make(400, periodic=periodic)

    members = changed(reweighted(parts["ctc"][1], rewindowed), ("preprocessor.window", name))
    features = load_checkpoint(pack(tmp_path / "a.nemo", members)).features
    assert (features["window"], features["periodic"]) == (name, periodic)
    refused(
        pack(tmp_path / "b.nemo", changed(members, ("preprocessor.window_size", 0.02))),
        "window of 320",
    )


def test_settings_of_features_are_read_or_are_nemos_defaults(parts, tmp_path):
    given = {
        "normalize": "all_features", "preemph": None, "log_zero_guard_type": "clamp", "log_zero_guard_value": "eps",
        "mag_power": 1.0, "dither": 0.5, "pad_to": 16,
    }  # fmt: skip
    members = changed(
        parts["ctc"][1], *((f"preprocessor.{key}", value) for key, value in given.items())
    )
    features = FeatureConfig(**load_checkpoint(pack(tmp_path / "a.nemo", members)).features)
    assert features == FeatureConfig(
        normalization="all_features", preemphasis=0.0, guard="clamp", log_guard=2.0**-23, power=1
    )  # fmt: skip
    plain = load_checkpoint(pack(tmp_path / "b.nemo", parts["ctc"][1])).features
    assert FeatureConfig(**plain) == FeatureConfig()
    members = changed(
        parts["ctc"][1],
        ("preprocessor.normalize", "NA"),
        ("preprocessor.log_zero_guard_value", "1e-5"),
    )
    features = FeatureConfig(**load_checkpoint(pack(tmp_path / "c.nemo", members)).features)
    assert (features.normalization, features.log_guard) == ("none", 1e-5)


def test_a_tokenizer_that_is_none_or_of_another_size_is_refused(parts, tmp_path):
    members = parts["rnnt"][1]
    refused(
        pack(tmp_path / "a.nemo", members | {"0123_tokenizer.model": b"none"}),
        "tokenizer: expected a SentencePiece model",
    )
    small = SentencePieceTokenizer.train(TEXTS, vocab_size=V - 3)
    refused(
        pack(tmp_path / "b.nemo", members | {"0123_tokenizer.model": small.model}),
        f"tokenizer: expected {V} tokens, got {V - 3}",
    )


@pytest.mark.parametrize(
    "kind, target",
    [
        ("ctc", "EncDecCTCModel"),
        ("rnnt", "EncDecRNNTModel"),
        ("hybrid", "EncDecHybridRNNTCTCModel"),
    ],
)
def test_models_of_characters_take_their_labels_as_tokenizer(kind, target, parts, tmp_path):
    labels = [*" abcdefghijklmnopqrstuvwxyz'?.,:"][:V]
    named = [("labels", labels), ("target", f"x.{target}")]
    named += [("decoder.vocabulary", "${labels}")] if kind == "ctc" else []
    members = changed(parts[kind][1], *named)
    loaded = load_checkpoint(pack(tmp_path / "a.nemo", members))
    assert (
        loaded.tokenizer == CharTokenizer("".join(labels))
        and loaded.tokenizer.decode([1, 2, 3]) == "abc"
    )
    refused(
        pack(tmp_path / "b.nemo", changed(members, ("labels", ["ab", *labels[1:]]))),
        "labels: expected distinct single characters",
    )
    refused(
        pack(tmp_path / "c.nemo", changed(members, ("labels", ["a"] * V))),
        "labels: expected distinct single characters",
    )


def test_local_attention_is_read_where_its_sides_are_equal(parts, tmp_path):
    members = changed(
        parts["ctc"][1],
        ("encoder.self_attention_model", "rel_pos_local_attn"),
        ("encoder.att_context_size", [8, 8]),
    )
    assert load_checkpoint(pack(tmp_path / "a.nemo", members)).model.config.encoder.context == (
        8,
        8,
    )
    for sides in ([8, 4], [-1, -1], [0, 0]):
        refused(
            pack(tmp_path / "b.nemo", changed(members, ("encoder.att_context_size", sides))),
            "encoder.att_context_size",
        )


def test_weights_that_share_memory_become_weights_of_their_own(parts, tmp_path):
    def shared(weights):
        flat = torch.cat([value.flatten() for name, value in weights.items() if ".lstm." in name])
        for name, value in weights.items():
            if ".lstm." in name:  # as cuDNN lays them out
                part, flat = flat[: value.numel()].view(value.shape), flat[value.numel() :]
                weights[name] = part
        weights["encoder.layers.1.self_attn.pos_bias_u"] = weights[
            "encoder.layers.0.self_attn.pos_bias_u"
        ]  # tied biases

    loaded = load_checkpoint(pack(tmp_path / "a.nemo", reweighted(parts["rnnt"][1], shared)))
    values = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert not any(value.is_meta for value in values)
    assert len({value.untyped_storage().data_ptr() for value in values}) == len(values)
    assert all(
        value.untyped_storage().nbytes() == value.numel() * value.element_size() for value in values
    )
    save_checkpoint(tmp_path / "b.safetensors", loaded)
