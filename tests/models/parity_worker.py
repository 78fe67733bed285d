"""Numbers of NeMo's and transformers' own models, small and of known weights.

    .venv-peers/bin/python -P parity_worker.py nemo FOLDER
    .venv-peers/bin/python -P parity_worker.py transformers FOLDER

writes `PEER.json`, which is committed in tests/golden: lengths, tokens with their frames, and some numbers of features, encoded frames,
CTC log-probs and joint logits. transformers' models are saved there too, in the folder `NAME` of each case.
"""

import contextlib
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
sys.path += [str(HERE), str(HERE.parents[1] / "benchmarks/peers")]

from nemo_stubs import Stub, stub_nemo  # noqa: E402
from parity_cases import (  # noqa: E402
    LENGTHS,
    PLACES,
    TARGETS,
    Case,
    V,
    fill,
    folder_cases,
    folder_config,
    nemo_cases,
    nemo_config,
    parakeet_json,
    speech,
)

MISSING = ("nemo", "omegaconf", "librosa", "einops", "pytorch_quantization")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: modules that NeMo imports and nothing provides become modules of empty classes."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A spec for the names in MISSING."""
        if name.split(".")[0] in MISSING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        """A stub."""
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def same(given: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator that changes nothing."""
    return given


def add_package(name: str) -> None:
    """Make modules of a folder of NeMo importable without its __init__."""
    root = Path(sys.modules["nemo"].__path__[0])
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(root / name.split(".", 1)[1].replace(".", "/"))]


def import_nemo() -> types.SimpleNamespace:
    """NeMo's modules that are tested, imported from its files without the packages around them."""
    stub_nemo()
    sys.meta_path.append(Absent())
    asr = "nemo.collections.asr."
    for name in ("core", "core.classes", "core.classes.mixins", "utils"):
        sys.modules[f"nemo.{name}"].__path__ = []  # stubs: so are the modules in them
    stubs = ("models", "parts.preprocessing.perturb", "parts.preprocessing.segment")
    for name in ("nemo.collections.audio", *(asr + stub for stub in stubs)):
        sys.modules[name] = Stub(name)
        sys.modules[name].__path__ = []
    for name in ("preprocessing", "mixins", "submodules.adapters"):
        add_package(f"{asr}parts.{name}")
    unused = {"is_access_enabled": lambda *_: False, "access_cfg": {}}
    access = type("AccessMixin", (), unused)
    unused = {
        "set_accepted_adapter_types": same,
        "is_adapter_available": lambda _: False,
    }
    adapters = type("Adapters", (), unused)
    given = {
        "nemo.core.classes": {"NeuralModule": nn.Module, "typecheck": lambda *_: same},
        "nemo.core.classes.common": {"typecheck": lambda *_: same},
        "nemo.core.classes.module": {"NeuralModule": nn.Module},
        "nemo.core.classes.mixins": {"AccessMixin": access},
        "nemo.core.classes.mixins.adapter_mixins": {
            "get_registered_adapter": same,
            "register_adapter": same,
            "AdapterModuleMixin": adapters,
        },
        "nemo.utils": {"avoid_float16_autocast_context": contextlib.nullcontext},
        "librosa": {"filters": types.SimpleNamespace(mel=mel)},
    }
    for name, values in given.items():
        vars(importlib.import_module(name)).update(values)
    asr = f"{asr}modules."
    found = {
        f"{asr}audio_preprocessing": ("AudioToMelSpectrogramPreprocessor",),
        f"{asr}conformer_encoder": ("ConformerEncoder",),
        f"{asr}conv_asr": ("ConvASRDecoder", "ConvASREncoder"),
        f"{asr}rnnt": ("RNNTDecoder", "RNNTJoint"),
        "nemo.collections.asr.parts.submodules.rnnt_greedy_decoding": (
            "GreedyBatchedRNNTInfer",
            "GreedyBatchedTDTInfer",
        ),
    }
    importlib.import_module(f"{asr}conv_asr").OmegaConf.to_container = same
    nemo = types.SimpleNamespace()
    for module, names in found.items():
        for name in names:
            setattr(nemo, name, getattr(importlib.import_module(module), name))
    return nemo


def mel(sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float, norm: str) -> Any:
    """librosa's mel filters, as transformers has them too: 4e-9 apart. torchaudio's, made in float32, are 3e-7 off."""
    from transformers.audio_utils import mel_filter_bank

    return mel_filter_bank(
        n_fft // 2 + 1, n_mels, fmin, fmax, sr, norm=norm, mel_scale="slaney"
    ).T


Answer = dict[str, Any]


def of_nemo(nemo: types.SimpleNamespace, case: Case) -> Answer:
    """What NeMo's modules compute for `case`."""
    config = nemo_config(case)
    transducer = case["kind"] != "ctc"
    made: dict[str, nn.Module] = {
        "preprocessor": nemo.AudioToMelSpectrogramPreprocessor(
            **bare(config["preprocessor"])
        ),
        "encoder": encoder_of(nemo, config["encoder"]),
    }
    if transducer:
        made["decoder"] = nemo.RNNTDecoder(**bare(config["decoder"]))
        made["joint"] = nemo.RNNTJoint(**bare(config["joint"]))
        made["joint"].log_softmax = False  # None normalises on a CPU only
    head = None
    if case["kind"] in ("ctc", "hybrid"):
        section = config["aux_ctc"] if transducer else config
        head = nemo.ConvASRDecoder(**bare(section["decoder"]))
        made["ctc_decoder" if transducer else "decoder"] = head
    model = nn.ModuleDict(made).eval()
    weights = fill(model.state_dict(), case.get("blank", 4.0))
    model.load_state_dict(weights)
    features, frames = made["preprocessor"](*speech(LENGTHS))
    encoded, steps = made["encoder"](audio_signal=features, length=frames)
    answer = {
        "frames": frames.tolist(),
        "steps": steps.tolist(),
        "shapes": shapes_of(weights),
        "features": features.transpose(1, 2),
        "encoded": encoded.transpose(1, 2),
    }
    if head is not None:
        answer["log_probs"] = head(encoder_output=encoded)
        rows = zip(answer["log_probs"].argmax(-1), steps, strict=True)
        answer["ctc_tokens"] = [collapsed(row[:n]) for row, n in rows]
    if transducer:
        answer |= transduced(nemo, made, encoded, steps, case["durations"])
    return answer


def transduced(
    nemo: Any, made: Any, encoded: Tensor, steps: Tensor, durations: Any
) -> Answer:
    """Joint logits of TARGETS, greedy tokens and their frames."""
    predicted = made["decoder"].predict(TARGETS, state=None, add_sos=True)[
        0
    ]  # (B, U1, H)
    how = {
        "decoder_model": made["decoder"],
        "joint_model": made["joint"],
        "blank_index": V,
        "max_symbols_per_step": 10,
        "use_cuda_graph_decoder": False,
    }
    infer = nemo.GreedyBatchedRNNTInfer(**how)
    if durations:
        infer = nemo.GreedyBatchedTDTInfer(**how, durations=durations)
    found = infer.forward(encoder_output=encoded, encoded_lengths=steps)[0]
    return {
        "joint": made["joint"].joint(encoded.transpose(1, 2), predicted),
        "tokens": [[*map(int, one.y_sequence)] for one in found],
        "starts": [[*map(int, one.timestamp)] for one in found],
    }


def encoder_of(nemo: types.SimpleNamespace, section: dict[str, Any]) -> nn.Module:
    """NeMo's encoder of a config's section."""
    target = section["_target_"].rpartition(".")[2]
    return getattr(nemo, target)(**bare(section))


def bare(config: dict[str, Any]) -> dict[str, Any]:
    """A module's arguments."""
    return {name: value for name, value in config.items() if name != "_target_"}


def shapes_of(weights: dict[str, Tensor]) -> dict[str, list[int]]:
    """Shapes by name."""
    return {name: list(value.shape) for name, value in weights.items()}


def collapsed(path: Tensor) -> list[int]:
    """Tokens of a path of CTC: repeats become one, blanks go."""
    return [token for token in path.unique_consecutive().tolist() if token != V]


def of_transformers(case: Case, path: Path) -> Answer:
    """What transformers' model computes for `case`; it saves itself at `path`."""
    import transformers
    from transformers.models.parakeet.feature_extraction_parakeet import (
        ParakeetFeatureExtractor,
    )

    config = folder_config(case)
    kind = case["kind"]
    (name,) = config["architectures"]
    settings = getattr(transformers, f"{name.replace('For', '')}Config")(**config)
    model = getattr(transformers, name)(settings).eval()
    weights = fill(model.state_dict(), case.get("blank", 4.0))
    model.load_state_dict(weights)
    extractor = ParakeetFeatureExtractor(feature_size=case.get("bins", 80))
    model.save_pretrained(path, max_shard_size="40KB" if kind == "tdt" else "5GB")
    extractor.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(parakeet_json(kind)))
    waveforms, lengths = speech(LENGTHS)
    sounds = [row[:n].numpy() for row, n in zip(waveforms, lengths, strict=True)]
    inputs = extractor(sounds, sampling_rate=16_000, return_tensors="pt")
    features = inputs["input_features"]
    mask = inputs["attention_mask"]
    out = model.encoder(features, attention_mask=mask, output_attention_mask=True)
    steps = out.attention_mask.sum(-1)
    answer = {
        "frames": mask.sum(-1).tolist(),
        "steps": steps.tolist(),
        "shapes": shapes_of(weights),
        "features": features,
        "encoded": out.last_hidden_state,
    }
    if kind == "ctc":
        logits = model(features, attention_mask=mask).logits
        paths = zip(model.generate(features, attention_mask=mask), steps, strict=True)
        tokens = [collapsed(path[:n]) for path, n in paths]
        return answer | {"log_probs": logits.log_softmax(-1), "ctc_tokens": tokens}
    start = torch.cat([torch.full((len(TARGETS), 1), V), TARGETS], 1)
    inputs = {"attention_mask": mask, "decoder_input_ids": start}
    answer["joint"] = model(features, **inputs).logits
    if (
        kind == "tdt"
    ):  # `generate` ignores the limit of labels, and supports durations 0, 1, 2 ... only
        return answer
    model.generation_config.decoder_start_token_id = V
    output = model.generate(features, attention_mask=mask)
    starts = output.durations.cumsum(1) - output.durations
    # it continues in the padding while a longer utterance does
    kept = (output.sequences != V) & (starts < steps[:, None])
    for stage, values in (("tokens", output.sequences), ("starts", starts)):
        answer[stage] = [
            row[one].tolist() for row, one in zip(values, kept, strict=True)
        ]
    return answer


def sampled(answer: Answer, places: dict[str, Any]) -> Answer:
    """What is committed of an answer: the chosen numbers of each stage, and everything else."""
    kept = dict(answer)
    for stage in places.keys() & answer.keys():
        numbers = answer[stage][places[stage]].flatten().tolist()
        kept[stage] = [round(number, 6) for number in numbers]
    return kept


def write(path: Path, package: str, answers: dict[str, Any]) -> None:
    """The file of tests/golden, a case a line."""
    lines = {"peer": f"{package} {version(package)}", **answers}
    rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in lines.items()]
    path.write_text("{" + ",\n".join(rows) + "}\n")


@torch.no_grad()
def main(peer: str, folder: Path) -> None:
    """Write to `folder` what a peer computes."""
    torch.set_num_threads(1)
    answers: dict[str, Any] = {}
    if peer == "nemo":
        nemo = import_nemo()
        for name, case in nemo_cases().items():
            answers[name] = sampled(of_nemo(nemo, case), PLACES)
        write(folder / "nemo.json", "nemo_toolkit", answers)
        return
    for name, case in folder_cases().items():
        answers[name] = sampled(of_transformers(case, folder / name), PLACES)
    write(folder / "transformers.json", peer, answers)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
