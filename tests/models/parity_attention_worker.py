"""NeMo's and transformers' own Canary, small and of known weights, written as they are published, with what they compute.

    .venv-peers/bin/python -P parity_attention_worker.py nemo FOLDER
    .venv-peers/bin/python -P parity_attention_worker.py transformers FOLDER

writes for each case `NAME.nemo` or the folder `NAME`, and `NAME.pt`: waveforms, features, encoded frames, logits, greedy tokens,
prompt and text; and `PEER_attention.json`, which is committed in tests/golden.
"""

import importlib
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

from parity_attention_cases import (  # noqa: E402
    CHOSEN,
    EOS,
    MOST,
    PAD,
    TEXT,
    archive_config,
    attention_cases,
    attention_folders,
    attention_goldens,
    canary_config,
    canary_json,
    fill_attention,
    members,
    write_archive,
)  # fmt: skip
from parity_cases import LENGTHS, Case, speech  # noqa: E402
from parity_worker import Answer, Stub, bare, encoder_of, import_nemo, same  # noqa: E402

# In the words of NeMo's manifests; asrkit's are ASKED.
NEMO_SLOTS = {
    "canary": {"source_lang": "de", "target_lang": "en", "task": "translate", "pnc": "no"},
    "canary2": {
        "source_lang": "en", "target_lang": "de", "pnc": "yes", "emotion": "<|emo:undefined|>", "itn": "yes",
        "timestamp": "no", "diarize": "no", "decodercontext": "",
    },
}  # fmt: skip


def import_attention() -> types.SimpleNamespace:
    """NeMo's modules of EncDecMultiTaskModel."""
    nemo = import_nemo()
    root = Path(sys.modules["nemo"].__path__[0])
    for name in (
        "nemo.collections.asr.modules.transformer", "nemo.collections.common.tokenizers",
        "nemo.collections.common.prompts", "nemo.collections.common.data",
    ):  # fmt: skip
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(root / name.split(".", 1)[1].replace(".", "/"))]
    parts = "nemo.collections.common.parts"
    exportable = type("Exportable", (), {})
    vars(sys.modules["nemo.core.classes"]).update(Exportable=exportable)
    vars(importlib.import_module("nemo.core.classes.exportable")).update(
        Exportable=exportable
    )
    vars(sys.modules["nemo.core.classes.mixins"]).update(
        adapter_mixins=sys.modules["nemo.core.classes.mixins.adapter_mixins"]
    )
    for name in ("omegaconf.omegaconf", "nemo.collections.common.data.prompt_fn"):
        sys.modules[name] = Stub(name)
    sys.modules[
        "nemo.collections.common.data.prompt_fn"
    ].registered_prompt_format_fn = lambda *_: same
    vars(importlib.import_module("omegaconf")).update(DictConfig=dict)
    for file in ("transformer_utils", "multi_layer_perceptron"):
        found = importlib.import_module(f"{parts}.{file}")
        vars(sys.modules[parts]).update(
            {k: v for k, v in vars(found).items() if k[0] != "_"}
        )
    transformer = "nemo.collections.asr.modules.transformer."
    tokenizers = "nemo.collections.common.tokenizers."
    aggregate = importlib.import_module(
        f"{tokenizers}aggregate_tokenizer"
    ).AggregateTokenizer
    spec = importlib.import_module(f"{tokenizers}tokenizer_spec").TokenizerSpec
    vars(sys.modules[tokenizers[:-1]]).update(
        AggregateTokenizer=aggregate, TokenizerSpec=spec
    )
    canary = importlib.import_module(f"{tokenizers}canary_tokenizer")
    nemo.CanaryTokenizer, nemo.CanaryBPETokenizer = (
        canary.CanaryTokenizer,
        canary.CanaryBPETokenizer,
    )
    nemo.SentencePieceTokenizer = canary.SentencePieceTokenizer
    prompts = "nemo.collections.common.prompts."
    nemo.prompts = {
        "canary": importlib.import_module(f"{prompts}canary").CanaryPromptFormatter,
        "canary2": importlib.import_module(f"{prompts}canary2").Canary2PromptFormatter,
    }
    nemo.decoder = importlib.import_module(
        f"{transformer}transformer"
    ).TransformerDecoderNM
    nemo.generator = importlib.import_module(
        f"{transformer}transformer_generators"
    ).GreedySequenceGenerator
    classifier = "nemo.collections.asr.parts.submodules.token_classifier"
    nemo.classifier = importlib.import_module(classifier).TokenClassifier
    return nemo


def nemo_tokenizer(nemo: types.SimpleNamespace, case: Case, folder: Path) -> Any:
    """NeMo's tokenizer of the archive's files."""
    files = {}
    for name, content in members(case).items():
        (folder / name).write_bytes(content)
        files[name] = folder / name
    if case["tokenizer"] == "bpe":
        return nemo.CanaryBPETokenizer(model_path=str(files["9_tokenizer.model"]))
    one = {
        name: nemo.SentencePieceTokenizer(model_path=str(file))
        for name, file in zip(("spl_tokens", "en", "de"), files.values(), strict=True)
    }
    return nemo.CanaryTokenizer(one)


def of_nemo(
    nemo: types.SimpleNamespace, case: Case, folder: Path, path: Path | None = None
) -> Answer:
    """What NeMo's modules compute for `case`; with `path` the archive is written there."""
    config = archive_config(case)
    sizes = dict(config["transf_decoder"]["config_dict"])
    made: dict[str, nn.Module] = {
        "preprocessor": nemo.AudioToMelSpectrogramPreprocessor(
            **bare(config["preprocessor"])
        ),
        "encoder": encoder_of(nemo, config["encoder"]),
        "transf_decoder": nemo.decoder(**sizes),
        "log_softmax": nemo.classifier(**bare(config["head"])),
    }
    width = config["encoder"]["d_model"]
    if width != case["decoder"]:
        made["encoder_decoder_proj"] = nn.Linear(width, case["decoder"])
    made["log_softmax"].mlp.layer0.weight = made[
        "transf_decoder"
    ].embedding.token_embedding.weight
    state = {
        f"{part}.{name}": value
        for part, module in made.items()
        for name, value in module.state_dict().items()
    }
    kept = ("featurizer.window", "featurizer.fb", "pos_enc", "mlp.layer0.weight")
    weights = fill_attention(state, "log_softmax.mlp.layer0.bias", kept)
    weights["log_softmax.mlp.layer0.weight"] = weights[
        "transf_decoder._embedding.token_embedding.weight"
    ]
    for part, module in made.items():
        own = {
            name.removeprefix(f"{part}."): v
            for name, v in weights.items()
            if name.startswith(f"{part}.")
        }
        module.eval().load_state_dict(own)
    if path:
        write_archive(path, case, weights)
    waveforms, lengths = speech(LENGTHS)
    features, frames = made["preprocessor"](waveforms, lengths)
    encoded, steps = made["encoder"](audio_signal=features, length=frames)
    encoded = encoded.transpose(1, 2)
    if "encoder_decoder_proj" in made:
        encoded = made["encoder_decoder_proj"](encoded)
    mask = (torch.arange(encoded.shape[1]) < steps[:, None]).float()
    tokenizer = nemo_tokenizer(nemo, case, folder)
    formatter = nemo.prompts[case["prompt"]](tokenizer=tokenizer)
    turn = {"role": "user", "slots": NEMO_SLOTS[case["prompt"]]}
    prompt = formatter.encode_dialog([turn])["context_ids"].tolist()
    given = torch.cat([torch.tensor([prompt] * len(LENGTHS)), TEXT], 1)
    states = made["transf_decoder"](
        input_ids=given,
        decoder_mask=torch.ones_like(given),
        encoder_embeddings=encoded,
        encoder_mask=mask,
    )
    decoder = made["transf_decoder"]
    generator = nemo.generator(
        decoder.embedding, decoder.decoder, made["log_softmax"], pad=PAD, bos=4, eos=EOS,
        max_sequence_length=MOST, max_delta_length=50,
    )  # fmt: skip
    said = generator(torch.tensor([prompt] * len(LENGTHS)), encoded, mask)[0]
    answer = {
        "waveforms": waveforms, "lengths": lengths, "features": features.transpose(1, 2), "frames": frames,
        "encoded": encoded, "steps": steps, "prompt": prompt, "logits": made["log_softmax"](hidden_states=states),
        "tokens": until_end(said, len(prompt)),
    }  # fmt: skip
    text = [token for token in TEXT[2].tolist() if token < tokenizer.vocab_size]
    answer |= {"tokens_of_text": text, "text": tokenizer.ids_to_text(text)}
    return answer | {
        "shapes": {name: list(value.shape) for name, value in weights.items()}
    }


def until_end(said: Tensor, P: int) -> list[list[int]]:
    """The tokens behind a prompt of P, up to the end."""
    rows = [row[P:].tolist() for row in said]
    return [row[: row.index(EOS)] if EOS in row else row for row in rows]


def of_transformers(case: Case, folder: Path, path: Path | None = None) -> Answer:
    """What transformers' model computes for `case`; with `path` it saves itself there."""
    from transformers import CanaryConfig, CanaryForConditionalGeneration
    from transformers.models.parakeet.feature_extraction_parakeet import (
        ParakeetFeatureExtractor,
    )

    config = canary_config(case)
    model = CanaryForConditionalGeneration(CanaryConfig(**config)).eval()
    weights = fill_attention(model.state_dict(), "proj_out.bias", ("proj_out.weight",))
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    model.load_state_dict(weights)
    extractor = ParakeetFeatureExtractor(
        feature_size=config["encoder_config"]["num_mel_bins"]
    )
    if path:
        model.save_pretrained(path)
        extractor.save_pretrained(path)
        (path / "tokenizer.json").write_text(json.dumps(canary_json()))
    waveforms, lengths = speech(LENGTHS)
    rows = [row[:n].numpy() for row, n in zip(waveforms, LENGTHS, strict=True)]
    found = extractor(rows, sampling_rate=16_000, return_tensors="pt", padding=True)
    features, mask = found["input_features"], found["attention_mask"]
    out = model.model.encoder(features, attention_mask=mask)
    steps = out.attention_mask.sum(-1)
    prompt = [
        7,
        4,
        14,
        18,
        17,
        5,
        9,
        11,
        13,
    ]  # startofcontext ... nodiarize, as CONTROL numbers them
    prompts = torch.tensor([prompt] * len(LENGTHS))
    given = torch.cat([prompts, TEXT], 1)
    logits = model(features, attention_mask=mask, decoder_input_ids=given).logits
    said = model.generate(
        features, attention_mask=mask, decoder_input_ids=prompts, do_sample=False, num_beams=1,
        max_new_tokens=MOST - len(prompt),
    )  # fmt: skip
    answer = {
        "waveforms": waveforms, "lengths": lengths, "features": features, "frames": mask.sum(-1),
        "encoded": out.last_hidden_state, "steps": steps, "prompt": prompt, "logits": logits,
        "tokens": until_end(said, len(prompt)),
    }  # fmt: skip
    return answer | {
        "shapes": {name: list(value.shape) for name, value in weights.items()}
    }


def sampled(answer: Answer) -> dict[str, Any]:
    """What is committed of an answer: lengths, prompt, tokens, and some numbers of each stage."""
    kept = {name: answer[name].tolist() for name in ("frames", "steps")}
    kept |= {name: answer[name] for name in ("shapes", "prompt", "tokens")}
    for name, place in CHOSEN.items():
        kept[name] = [round(x, 6) for x in answer[name][place].flatten().tolist()]
    return kept


@torch.no_grad()
def main(peer: str, folder: Path) -> None:
    """Write the files of `peer` and what it computes of them to `folder`, and what tests/golden has of it."""
    torch.set_num_threads(1)
    if peer == "nemo":
        package, nemo = "nemo_toolkit", import_attention()
        for name, case in attention_cases().items():
            torch.save(
                of_nemo(nemo, case, folder, folder / f"{name}.nemo"),
                folder / f"{name}.pt",
            )
        golden = {
            name: of_nemo(nemo, case, folder)
            for name, case in attention_goldens().items()
        }
    else:
        package = "transformers"
        for name, case in attention_folders().items():
            torch.save(
                of_transformers(case, folder, folder / name), folder / f"{name}.pt"
            )
        golden = {
            name: of_transformers(case, folder)
            for name, case in attention_goldens().items()
        }
    lines = [f'"peer": "{package} {version(package)}"']
    lines += [
        f"{json.dumps(name)}: {json.dumps(sampled(answer))}"
        for name, answer in golden.items()
    ]
    (folder / f"{peer}_attention.json").write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
