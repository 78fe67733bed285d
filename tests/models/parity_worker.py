"""NeMo's and transformers' own models, small and of known weights, written as they are published, with what they compute.

    .venv-peers/bin/python -P parity_worker.py nemo FOLDER
    .venv-peers/bin/python -P parity_worker.py transformers FOLDER

writes for each case `NAME.nemo` or the folder `NAME`, and `NAME.pt`: waveforms, features, encoded frames, CTC log-probs, joint
logits, tokens and frames; and `PEER.json`, which is committed in tests/golden.
An archive has the layout of NeMo's `save_to`, and is put together here from its modules: `save_to` itself needs lightning.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import json
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1] / "asrkit/workbench/bench/peers")]

from nemo_stubs import Stub, stub_nemo  # noqa: E402
from parity_cases import (  # noqa: E402
    LENGTHS,
    PLACES,
    TARGETS,
    Case,
    V,
    cases,
    fill,
    folder_config,
    golden_cases,
    nemo_cases,
    nemo_config,
    parakeet_json,
    picked,
    speech,
    write_nemo,
)  # fmt: skip

MISSING = ("nemo", "omegaconf", "librosa", "einops", "pytorch_quantization")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last of the finders: what NeMo's modules name and nothing provides is a module of empty classes."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A spec for the names in MISSING."""
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".")[0] in MISSING
            else None
        )

    def create_module(self, spec: Any) -> types.ModuleType:
        """A stub."""
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def same(given: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator that changes nothing."""
    return given


def import_nemo() -> types.SimpleNamespace:
    """NeMo's modules that are tested, imported from its files without the packages around them."""
    stub_nemo()
    root = Path(sys.modules["nemo"].__path__[0])
    sys.meta_path.append(Absent())
    asr = "nemo.collections.asr."
    for name in (
        "nemo.core",
        "nemo.core.classes",
        "nemo.core.classes.mixins",
        "nemo.utils",
    ):
        sys.modules[name].__path__ = []  # stubs: so are the modules in them
    for name in (
        "nemo.collections.audio",
        f"{asr}models",
        f"{asr}parts.preprocessing.perturb",
        f"{asr}parts.preprocessing.segment",
    ):
        sys.modules[name] = Stub(name)
        sys.modules[name].__path__ = []
    for name in (
        f"{asr}parts.preprocessing",
        f"{asr}parts.mixins",
        f"{asr}parts.submodules.adapters",
    ):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(root / name.split(".", 1)[1].replace(".", "/"))]
    access = type(
        "AccessMixin", (), {"is_access_enabled": lambda *_: False, "access_cfg": {}}
    )
    adapters = type(
        "Adapters",
        (),
        {"set_accepted_adapter_types": same, "is_adapter_available": lambda _: False},
    )
    given = {
        "nemo.core.classes": {"NeuralModule": nn.Module, "typecheck": lambda *_: same},
        "nemo.core.classes.common": {"typecheck": lambda *_: same},
        "nemo.core.classes.module": {"NeuralModule": nn.Module},
        "nemo.core.classes.mixins": {"AccessMixin": access},
        "nemo.core.classes.mixins.adapter_mixins": {
            "get_registered_adapter": same, "register_adapter": same,
            "AdapterModuleMixin": adapters,
        },
        "nemo.utils": {"avoid_float16_autocast_context": contextlib.nullcontext},
        "librosa": {"filters": types.SimpleNamespace(mel=mel)},
    }  # fmt: skip
    for name, values in given.items():
        vars(importlib.import_module(name)).update(values)
    asr = f"{asr}modules."
    found = {
        f"{asr}audio_preprocessing": ("AudioToMelSpectrogramPreprocessor",), f"{asr}conformer_encoder": ("ConformerEncoder",),
        f"{asr}conv_asr": ("ConvASRDecoder", "ConvASREncoder"), f"{asr}rnnt": ("RNNTDecoder", "RNNTJoint"),
        "nemo.collections.asr.parts.submodules.rnnt_greedy_decoding": ("GreedyBatchedRNNTInfer", "GreedyBatchedTDTInfer"),
    }  # fmt: skip
    importlib.import_module(f"{asr}conv_asr").OmegaConf.to_container = same
    classes = {
        name: getattr(importlib.import_module(module), name)
        for module, names in found.items()
        for name in names
    }
    return types.SimpleNamespace(**classes)


def mel(sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float, norm: str) -> Any:
    """librosa's mel filters, as transformers has them too: 4e-9 apart. torchaudio's, made in float32, are 3e-7 off."""
    from transformers.audio_utils import mel_filter_bank

    return mel_filter_bank(
        n_fft // 2 + 1, n_mels, fmin, fmax, sr, norm=norm, mel_scale="slaney"
    ).T


Answer = dict[str, Any]


def of_nemo(
    nemo: types.SimpleNamespace, case: Case, path: Path | None = None
) -> Answer:
    """What NeMo's modules compute for `case`; with `path` the archive is written there."""
    config, transducer = nemo_config(case), case["kind"] != "ctc"
    made: dict[str, nn.Module] = {
        "preprocessor": nemo.AudioToMelSpectrogramPreprocessor(
            **bare(config["preprocessor"])
        ),
        "encoder": encoder_of(nemo, config["encoder"]),
    }
    if transducer:
        made["decoder"] = nemo.RNNTDecoder(**bare(config["decoder"]))
        made["joint"] = joint = nemo.RNNTJoint(**bare(config["joint"]))
        joint.log_softmax = False  # None normalises on a CPU only
    if case["kind"] in ("ctc", "hybrid"):
        head = config["aux_ctc"] if transducer else config
        made["ctc_decoder" if transducer else "decoder"] = ctc = nemo.ConvASRDecoder(
            **bare(head["decoder"])
        )
    weights = fill(
        {
            f"{part}.{name}": value
            for part, module in made.items()
            for name, value in module.state_dict().items()
        },
        case.get("blank", 4.0),
    )
    for part, module in made.items():
        own = {
            name.removeprefix(f"{part}."): value
            for name, value in weights.items()
            if name.startswith(f"{part}.")
        }
        module.eval().load_state_dict(own)
    if path:
        write_nemo(path, config, weights)
    waveforms, lengths = speech(LENGTHS)
    features, frames = made["preprocessor"](waveforms, lengths)
    encoded, steps = made["encoder"](audio_signal=features, length=frames)
    answer = {
        "waveforms": waveforms,
        "lengths": lengths,
        "features": features.transpose(1, 2),
        "frames": frames,
    }
    answer |= {"encoded": encoded.transpose(1, 2), "steps": steps}
    if case["kind"] in ("ctc", "hybrid"):
        answer["log_probs"] = ctc(encoder_output=encoded)
        answer["ctc_tokens"] = collapsed(answer["log_probs"], steps)
    if transducer:
        predicted = made["decoder"].predict(TARGETS, state=None, add_sos=True)[
            0
        ]  # (B, U1, H)
        answer["joint"] = joint.joint(encoded.transpose(1, 2), predicted)
        how = {
            "decoder_model": made["decoder"],
            "joint_model": joint,
            "blank_index": V,
            "max_symbols_per_step": 10,
        }
        how |= {"use_cuda_graph_decoder": False} | (
            {"durations": case["durations"]} if case["durations"] else {}
        )
        infer = (
            nemo.GreedyBatchedTDTInfer
            if case["durations"]
            else nemo.GreedyBatchedRNNTInfer
        )(**how)
        found = infer.forward(encoder_output=encoded, encoded_lengths=steps)[0]
        answer["tokens"] = [[*map(int, one.y_sequence)] for one in found]
        answer["starts"] = [[*map(int, one.timestamp)] for one in found]
    return {
        **answer,
        "shapes": {name: list(value.shape) for name, value in weights.items()},
    }


def encoder_of(nemo: types.SimpleNamespace, section: dict[str, Any]) -> nn.Module:
    """NeMo's encoder of a config's section."""
    target = section["_target_"].rpartition(".")[2]
    return getattr(nemo, target)(**bare(section))


def bare(config: dict[str, Any]) -> dict[str, Any]:
    """A module's arguments."""
    return {name: value for name, value in config.items() if name != "_target_"}


def collapsed(log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
    """Greedy CTC tokens: repeats become one, blanks go."""
    rows = [
        row[:n].argmax(-1).unique_consecutive().tolist()
        for row, n in zip(log_probs, lengths, strict=True)
    ]
    return [[token for token in row if token != V] for row in rows]


def of_transformers(case: Case, path: Path | None = None, shard: str = "5GB") -> Answer:
    """What transformers' model computes for `case`; with `path` it saves itself there."""
    import transformers
    from transformers.models.parakeet.feature_extraction_parakeet import (
        ParakeetFeatureExtractor,
    )

    config, kind = folder_config(case), case["kind"]
    (name,) = config["architectures"]
    model = getattr(transformers, name)(
        getattr(transformers, f"{name.replace('For', '')}Config")(**config)
    ).eval()
    weights = fill(model.state_dict(), case.get("blank", 4.0))
    model.load_state_dict(weights)
    bins = config["encoder_config"]["num_mel_bins"]
    extractor = ParakeetFeatureExtractor(feature_size=bins)
    if path:
        model.save_pretrained(path, max_shard_size=shard)
        extractor.save_pretrained(path)
        (path / "tokenizer.json").write_text(json.dumps(parakeet_json(kind)))
    waveforms, lengths = speech(LENGTHS)
    sounds = [row[:n].numpy() for row, n in zip(waveforms, lengths, strict=True)]
    inputs = extractor(sounds, sampling_rate=16_000, return_tensors="pt")
    features, mask = inputs["input_features"], inputs["attention_mask"]
    out = model.encoder(features, attention_mask=mask, output_attention_mask=True)
    encoded, steps = out.last_hidden_state, out.attention_mask.sum(-1)
    answer = {
        "waveforms": waveforms,
        "lengths": lengths,
        "features": features,
        "frames": mask.sum(-1),
    }
    answer |= {
        "encoded": encoded,
        "steps": steps,
        "shapes": {name: list(value.shape) for name, value in weights.items()},
    }
    if kind == "ctc":
        answer["log_probs"] = model(features, attention_mask=mask).logits.log_softmax(
            -1
        )
        rows = [
            row[:n].unique_consecutive()
            for row, n in zip(
                model.generate(features, attention_mask=mask), steps, strict=True
            )
        ]
        return answer | {"ctc_tokens": [row[row != V].tolist() for row in rows]}
    start = torch.cat([torch.full((len(TARGETS), 1), V), TARGETS], 1)
    answer["joint"] = model(
        features, attention_mask=mask, decoder_input_ids=start
    ).logits
    model.generation_config.decoder_start_token_id = V
    model.generation_config.suppress_tokens = [
        *range(V + 1, V + 1 + len(case["durations"]))
    ] or None  # as converted ones have
    said = model.generate(features, attention_mask=mask)
    starts = said.durations.cumsum(1) - said.durations
    label, inside = said.sequences != V, starts < steps[:, None]
    answer["generated"] = [
        row[keep].tolist()
        for row, keep in zip(said.sequences, label & inside, strict=True)
    ]
    answer["generated_behind"] = (
        (label & ~inside).sum(1).tolist()
    )  # on padding, while a longer utterance goes on
    answer |= greedy(model, out, steps, case["durations"])
    return answer


def greedy(
    model: Any, out: Any, steps: Tensor, durations: list[int], most: int = 10
) -> Answer:
    """Greedy tokens and their frames by definition, from the model's own modules: a loop over utterances, frames and labels."""
    tokens: list[list[int]] = []
    starts: list[list[int]] = []
    projected = model.encoder_projector(out.last_hidden_state)
    for frames, n in zip(projected, steps.tolist(), strict=True):
        said, when, t, budget, state, last = [], [], 0, most, None, V
        row, state = advance(model, last, None)
        while t < n:
            logits = model.joint(
                encoder_hidden_states=frames[t], decoder_hidden_states=row
            )
            token = int(logits[: V + 1].argmax())
            jump = (
                durations[int(logits[V + 1 :].argmax())]
                if durations
                else int(token == V)
            )
            if token == V:
                jump = max(jump, 1)
            else:
                said, when, budget = [*said, token], [*when, t], budget - 1
                row, state = advance(model, token, state)
                jump = max(jump, 1) if budget == 0 else jump
            t, budget = t + jump, most if jump else budget
        tokens, starts = [*tokens, said], [*starts, when]
    return {"tokens": tokens, "starts": starts}


def advance(model: Any, token: int, state: Any) -> tuple[Tensor, Any]:
    """The prediction network one label further: its projected output and its state."""
    predicted, state = model.decoder.lstm(
        model.decoder.embedding(torch.tensor([[token]])), state
    )
    return model.decoder.decoder_projector(predicted)[0, 0], state


def sampled(answer: Answer) -> dict[str, Any]:
    """What is committed of an answer: lengths, tokens, and some numbers of each stage."""
    kept = {name: answer[name].tolist() for name in ("frames", "steps")} | {
        "shapes": answer["shapes"]
    }
    kept |= {
        name: answer[name]
        for name in ("tokens", "starts", "ctc_tokens")
        if name in answer
    }
    return kept | {
        name: [round(x, 6) for x in picked(name, answer[name]).tolist()]
        for name in PLACES
        if name in answer
    }


@torch.no_grad()
def main(peer: str, folder: Path) -> None:
    """Write the files of `peer` and what it computes of them to `folder`, and what tests/golden has of it to PEER.json."""
    torch.set_num_threads(1)
    if peer == "nemo":
        package, compute = "nemo_toolkit", functools.partial(of_nemo, import_nemo())
        for name, case in nemo_cases().items():
            torch.save(compute(case, folder / f"{name}.nemo"), folder / f"{name}.pt")
    else:
        package, compute = "transformers", of_transformers
        for name, case in cases().items():
            answer = of_transformers(
                case, folder / name, "40KB" if name == "tdt" else "5GB"
            )
            torch.save(answer, folder / f"{name}.pt")
    lines = [f'"peer": "{package} {version(package)}"']
    lines += [
        f"{json.dumps(name)}: {json.dumps(sampled(compute(case)))}"
        for name, case in golden_cases().items()
    ]
    (folder / f"{peer}.json").write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
