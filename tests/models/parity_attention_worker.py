"""Numbers of NeMo's and transformers' own Canary, small and of known weights.

    .venv-peers/bin/python -P parity_attention_worker.py nemo FOLDER
    .venv-peers/bin/python -P parity_attention_worker.py transformers FOLDER

writes `PEER_attention.json`, which is committed in tests/golden: lengths, prompt, greedy tokens, a text, and some numbers of encoded
frames and logits. transformers' model is saved there too, in the folder `canary2`.
"""

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1] / "benchmarks/peers")]

from parity_attention_cases import (  # noqa: E402
    CASE,
    CHOSEN,
    EOS,
    MOST,
    PAD,
    TEXT,
    archive_config,
    attention_cases,
    canary_config,
    canary_json,
    fill_attention,
    members,
)
from parity_cases import LENGTHS, Case, speech  # noqa: E402
from parity_worker import (  # noqa: E402
    Answer,
    Stub,
    add_package,
    bare,
    encoder_of,
    import_nemo,
    same,
    sampled,
    shapes_of,
    write,
)

# As NeMo's manifests spell it; ARGUMENTS has asrkit's arguments.
NEMO_SLOTS = {
    "canary": {
        "source_lang": "de",
        "target_lang": "en",
        "task": "translate",
        "pnc": "no",
    },
    "canary2": {
        "source_lang": "en",
        "target_lang": "de",
        "pnc": "yes",
        "emotion": "<|emo:undefined|>",
        "itn": "yes",
        "timestamp": "no",
        "diarize": "no",
        "decodercontext": "",
    },
}


def import_attention() -> types.SimpleNamespace:
    """NeMo's modules of EncDecMultiTaskModel."""
    nemo = import_nemo()
    common = "nemo.collections.common."
    transformer = "nemo.collections.asr.modules.transformer"
    for name in ("tokenizers", "prompts", "data"):
        add_package(common + name)
    add_package(transformer)
    for name in ("omegaconf.omegaconf", f"{common}data.prompt_fn"):
        sys.modules[name] = Stub(name)
    exportable = {"Exportable": type("Exportable", (), {})}
    mixins = sys.modules["nemo.core.classes.mixins.adapter_mixins"]
    given = {
        "nemo.core.classes": exportable,
        "nemo.core.classes.exportable": exportable,
        "nemo.core.classes.mixins": {"adapter_mixins": mixins},
        "omegaconf": {"DictConfig": dict},
        f"{common}data.prompt_fn": {"registered_prompt_format_fn": lambda *_: same},
    }
    for name, values in given.items():
        vars(importlib.import_module(name)).update(values)
    for file in ("transformer_utils", "multi_layer_perceptron"):
        found = vars(importlib.import_module(f"{common}parts.{file}"))
        public = {name: value for name, value in found.items() if name[0] != "_"}
        vars(sys.modules[f"{common}parts"]).update(public)
    for file, name in (
        ("aggregate_tokenizer", "AggregateTokenizer"),
        ("tokenizer_spec", "TokenizerSpec"),
    ):
        value = getattr(importlib.import_module(f"{common}tokenizers.{file}"), name)
        setattr(sys.modules[f"{common}tokenizers"], name, value)
    found = {
        f"{common}tokenizers.canary_tokenizer": (
            "CanaryTokenizer",
            "CanaryBPETokenizer",
            "SentencePieceTokenizer",
        ),
        f"{common}prompts.canary": ("CanaryPromptFormatter",),
        f"{common}prompts.canary2": ("Canary2PromptFormatter",),
        f"{transformer}.transformer": ("TransformerDecoderNM",),
        f"{transformer}.transformer_generators": ("GreedySequenceGenerator",),
        "nemo.collections.asr.parts.submodules.token_classifier": ("TokenClassifier",),
    }
    for module, names in found.items():
        for name in names:
            setattr(nemo, name, getattr(importlib.import_module(module), name))
    return nemo


def nemo_tokenizer(nemo: types.SimpleNamespace, case: Case, folder: Path) -> Any:
    """NeMo's tokenizer of the archive's files."""
    files = {}
    for name, content in members(case).items():
        (folder / name).write_bytes(content)
        files[name] = folder / name
    if case["tokenizer"] == "bpe":
        return nemo.CanaryBPETokenizer(model_path=str(files["9_tokenizer.model"]))
    names = ("spl_tokens", "en", "de")
    parts = [nemo.SentencePieceTokenizer(str(file)) for file in files.values()]
    return nemo.CanaryTokenizer(dict(zip(names, parts, strict=True)))


def of_nemo(nemo: types.SimpleNamespace, case: Case, folder: Path) -> Answer:
    """What NeMo's modules compute for `case`."""
    config = archive_config(case)
    decoder = nemo.TransformerDecoderNM(**config["transf_decoder"]["config_dict"])
    head = nemo.TokenClassifier(**bare(config["head"]))
    made: dict[str, nn.Module] = {
        "preprocessor": nemo.AudioToMelSpectrogramPreprocessor(
            **bare(config["preprocessor"])
        ),
        "encoder": encoder_of(nemo, config["encoder"]),
        "transf_decoder": decoder,
        "log_softmax": head,
    }
    width = config["encoder"]["d_model"]
    if width != case["decoder"]:
        made["encoder_decoder_proj"] = nn.Linear(width, case["decoder"])
    head.mlp.layer0.weight = decoder.embedding.token_embedding.weight
    model = nn.ModuleDict(made).eval()
    kept = ("featurizer.window", "featurizer.fb", "pos_enc", "mlp.layer0.weight")
    weights = fill_attention(model.state_dict(), "log_softmax.mlp.layer0.bias", kept)
    embedding = weights["transf_decoder._embedding.token_embedding.weight"]
    weights["log_softmax.mlp.layer0.weight"] = embedding
    model.load_state_dict(weights)
    features, frames = made["preprocessor"](*speech(LENGTHS))
    encoded, steps = made["encoder"](audio_signal=features, length=frames)
    encoded = encoded.transpose(1, 2)
    if "encoder_decoder_proj" in made:
        encoded = made["encoder_decoder_proj"](encoded)
    mask = (torch.arange(encoded.shape[1]) < steps[:, None]).float()
    tokenizer = nemo_tokenizer(nemo, case, folder)
    formatters = {
        "canary": nemo.CanaryPromptFormatter,
        "canary2": nemo.Canary2PromptFormatter,
    }
    turn = {"role": "user", "slots": NEMO_SLOTS[case["prompt"]]}
    formatter = formatters[case["prompt"]](tokenizer=tokenizer)
    prompt = formatter.encode_dialog([turn])["context_ids"].tolist()
    prompts = torch.tensor([prompt] * len(LENGTHS))
    given = torch.cat([prompts, TEXT], 1)
    states = made["transf_decoder"](
        input_ids=given,
        decoder_mask=torch.ones_like(given),
        encoder_embeddings=encoded,
        encoder_mask=mask,
    )
    generator = nemo.GreedySequenceGenerator(
        decoder.embedding,
        decoder.decoder,
        head,
        pad=PAD,
        bos=4,
        eos=EOS,
        max_sequence_length=MOST,
        max_delta_length=50,
    )
    output = generator(prompts, encoded, mask)[0]
    text = [token for token in TEXT[2].tolist() if token < tokenizer.vocab_size]
    return {
        "frames": frames.tolist(),
        "steps": steps.tolist(),
        "shapes": shapes_of(weights),
        "encoded": encoded,
        "prompt": prompt,
        "logits": head(hidden_states=states),
        "tokens": until_end(output, len(prompt)),
        "text": [text, tokenizer.ids_to_text(text)],
    }


def until_end(output: Tensor, P: int) -> list[list[int]]:
    """The tokens after a prompt of P, up to the end."""
    rows = [row[P:].tolist() for row in output]
    return [row[: row.index(EOS)] if EOS in row else row for row in rows]


def of_transformers(case: Case, path: Path) -> Answer:
    """What transformers' model computes for `case`; it saves itself at `path`."""
    from transformers import CanaryConfig, CanaryForConditionalGeneration
    from transformers.models.parakeet.feature_extraction_parakeet import (
        ParakeetFeatureExtractor,
    )

    config = canary_config(case)
    model = CanaryForConditionalGeneration(CanaryConfig(**config)).eval()
    weights = fill_attention(model.state_dict(), "proj_out.bias", ("proj_out.weight",))
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    model.load_state_dict(weights)
    extractor = ParakeetFeatureExtractor(feature_size=case.get("bins", 80))
    model.save_pretrained(path)
    extractor.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(canary_json()))
    waveforms, _ = speech(LENGTHS)
    rows = [row[:n].numpy() for row, n in zip(waveforms, LENGTHS, strict=True)]
    found = extractor(rows, sampling_rate=16_000, return_tensors="pt", padding=True)
    features = found["input_features"]
    mask = found["attention_mask"]
    out = model.model.encoder(features, attention_mask=mask)
    steps = out.attention_mask.sum(-1)
    # startofcontext ... nodiarize, as CONTROL numbers them
    prompt = [7, 4, 14, 18, 17, 5, 9, 11, 13]
    prompts = torch.tensor([prompt] * len(LENGTHS))
    given = torch.cat([prompts, TEXT], 1)
    logits = model(features, attention_mask=mask, decoder_input_ids=given).logits
    output = model.generate(
        features,
        attention_mask=mask,
        decoder_input_ids=prompts,
        do_sample=False,
        num_beams=1,
        max_new_tokens=MOST - len(prompt),
    )
    return {
        "frames": mask.sum(-1).tolist(),
        "steps": steps.tolist(),
        "shapes": shapes_of(weights),
        "encoded": out.last_hidden_state,
        "prompt": prompt,
        "logits": logits,
        "tokens": until_end(output, len(prompt)),
    }


@torch.no_grad()
def main(peer: str, folder: Path) -> None:
    """Write to `folder` what a peer computes."""
    torch.set_num_threads(1)
    file = folder / f"{peer}_attention.json"
    if peer == "transformers":
        answer = of_transformers(CASE, folder / "canary2")
        write(file, peer, {"canary2": sampled(answer, CHOSEN)})
        return
    nemo = import_attention()
    cases = attention_cases().items()
    answers = {
        name: sampled(of_nemo(nemo, case, folder), CHOSEN) for name, case in cases
    }
    write(file, "nemo_toolkit", answers)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
