"""Readers of Canary: NeMo's archives and Hugging Face folders, what they refuse, and asrkit's own copies."""

import re
import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import aed_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import (
    AEDConfig,
    FastConformerConfig,
    load_checkpoint,
    save_checkpoint,
)
from asrkit.models.prompts import PromptFormat
from asrkit.text import AggregateTokenizer, SentencePieceTokenizer

sys.path.append(str(Path(__file__).resolve().parent))
import parity_attention_cases as known
from canary_files import CASE, OUTPUT, POSITIONS, archive, changed, folder, weights_of
from parity_cases import ENCODER, LENGTHS, speech


def refused(path: Path, message: str) -> None:
    """Loading is refused in one short line that holds `message`."""
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def pieces() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(known.model_of_pieces(known.pieces())).with_control()


@torch.no_grad()
def tokens(checkpoint, **asked):
    """Greedy tokens of some sound."""
    model = checkpoint.model
    features, frames = log_mel(
        *speech(LENGTHS), config=FeatureConfig(**checkpoint.features)
    )
    encoded, steps, _ = model.encode(features, frames)
    prompt = PromptFormat.from_notes(checkpoint.notes).tokens(**asked)
    return aed_greedy(model, encoded, steps, prompt=prompt).tokens()


def test_an_archive_becomes_the_model_of_its_config_and_so_does_its_copy(tmp_path):
    loaded = load_checkpoint(archive(tmp_path / "a.nemo"))
    how = ENCODER | CASE
    encoder = FastConformerConfig(
        bins=how["bins"], width=16, layers=how["layers"], heads=2, subsampling=8, subsampling_channels=4, kernel=9,
        scale_input=False, dropout=0.1, dropout_attention=0.1, dropout_input=0.1,
    )  # fmt: skip
    assert loaded.model.config == AEDConfig(
        vocab_size=88,
        bos=4,
        eos=3,
        pad=2,
        encoder=encoder,
        width=16,
        layers=2,
        heads=4,
        most=known.MOST,
    )
    control = SentencePieceTokenizer(
        known.model_of_pieces(known.control_pieces())
    ).with_control()
    parts = (("spl_tokens", control), ("en", pieces()), ("de", pieces()))
    assert loaded.tokenizer == AggregateTokenizer(parts)
    assert (
        loaded.notes["target"] == "EncDecMultiTaskModel" and not loaded.model.training
    )
    prompt = PromptFormat.from_notes(loaded.notes)
    assert prompt.languages == ("en", "de")  # French has a token and no model
    assert prompt.tokens() == [
        7,
        4,
        14,
        18,
        18,
        5,
        8,
        11,
        13,
    ]  # with numerals, as the archive says
    save_checkpoint(tmp_path / "b.safetensors", loaded)
    again = load_checkpoint(tmp_path / "b.safetensors")
    assert again[1:] == loaded[1:]
    assert torch.equal(again.model.positions, loaded.model.positions)
    assert (
        tokens(again, language="de") == tokens(loaded, language="de") != tokens(loaded)
    )


def test_a_folder_becomes_the_model_of_its_config(tmp_path):
    loaded = load_checkpoint(folder(tmp_path / "a"))
    assert loaded.model.config.vocab_size == 56 and loaded.tokenizer.vocab_size == 52
    assert loaded.model.config.most == known.MOST
    assert PromptFormat.from_notes(loaded.notes).tokens() == [
        7,
        4,
        14,
        18,
        18,
        5,
        9,
        11,
        13,
    ]
    assert loaded.tokenizer.decode([18, 5, 22, 23, 2]) == "e"
    assert loaded.notes["source"].endswith(", canary")


def test_the_first_prompt_and_its_defaults_are_read(tmp_path):
    slots = {"source_lang": "de", "pnc": "no", "decodercontext": None}
    turns = [{"role": "user", "slots": slots}]
    path = archive(tmp_path / "a.nemo", prompt_format="canary", prompt_defaults=turns)
    prompt = PromptFormat.from_notes(load_checkpoint(path).notes)
    assert prompt.tokens() == [4, 17, 15, 17, 6]
    assert prompt.tokens(task="translate", punctuation=True) == [4, 17, 16, 18, 5]


def test_a_table_of_positions_that_grew_is_cut_to_the_models(tmp_path):
    weights = weights_of("nemo")
    table = weights[POSITIONS]
    weights[POSITIONS] = torch.cat([table, torch.zeros(8, table.shape[1])])
    path = known.write_archive(tmp_path / "a.nemo", CASE, weights)
    assert torch.equal(load_checkpoint(path).model.positions, table)


CONFIG = [
    ({"prompt_format": "plain"}, "prompt_format: expected one of ['canary', 'canary2'], got 'plain'."),
    ({"transf_decoder__pre_ln_final_layer_norm": False}, "transf_decoder.pre_ln_final_layer_norm: expected True, got False."),
    ({"transf_decoder__config_dict__pre_ln__": None}, "transf_decoder.config_dict.pre_ln: expected True, got False."),
    ({"transf_decoder__config_dict__hidden_act": "gelu"}, "config_dict.hidden_act: expected 'relu'"),
    ({"transf_decoder__config_dict__learn_positional_encodings": True}, "config_dict.learn_positional_encodings: expected False"),
    ({"transf_decoder__config_dict__num_attention_heads": 3}, "heads: expected a divisor of width=16, got 3."),
    ({"transf_decoder__config_dict__num_layers": 10**4}, "model: expected at most"),
    ({"transf_decoder__config_dict__max_sequence_length": 9}, "prompt: expected fewer tokens than the model's 9 positions, got 9."),
    ({"tokenizer__langs__spl_tokens__": None}, "a.nemo is damaged (IndexError"),
    ({"tokenizer__langs__en__model_path": "nemo:other.model"}, "a.nemo is damaged (it has no 'other.model')"),
    ({"prompt_defaults": [{"role": "user", "slots": {"decodercontext": "well"}}]}, "prompt_defaults.decodercontext: expected '', got 'well'."),
    ({"prompt_defaults": [{"role": "user", "slots": {"emotion": "<|emo:odd|>"}}]}, "prompt: expected a token for each of its places, got none for ['<|emo:odd|>']."),
    ({"prompt_defaults": [{"role": "user", "slots": {"source_lang": "fr"}}]}, "prompt.language: expected one of 'en', 'de', got 'fr'."),
    ({"prompt_defaults": "no"}, "a.nemo is damaged (TypeError"),
]  # fmt: skip


@pytest.mark.parametrize(
    "changes, message", CONFIG, ids=[next(iter(one)) for one, _ in CONFIG]
)
def test_a_setting_that_asrkit_does_not_do_is_refused_by_name(
    changes, message, tmp_path
):
    refused(archive(tmp_path / "a.nemo", **changes), message)


LAYER = "transf_decoder._decoder.layers.1."
WEIGHTS = [
    ({f"{LAYER}first_sub_layer.key_net.bias": None}, "a.nemo is damaged (it has no 'layers.1.self_attention.k.bias')"),
    ({f"{LAYER}third_sub_layer.gate.bias": torch.zeros(2)}, 'Unexpected key(s) in state_dict: "layers.1.third_sub_layer.gate.bias"'),
    ({POSITIONS: torch.zeros(9, 16)}, "size mismatch for positions"),
    ({OUTPUT: torch.zeros(88, 16)}, "output.weight: expected the weights of the embedding, to which it is tied, got others."),
    ({"encoder_decoder_proj.weight": torch.zeros(16, 16)}, 'Unexpected key(s) in state_dict: "encoder_projection.weight"'),
]  # fmt: skip


@pytest.mark.parametrize(
    "changes, message", WEIGHTS, ids=[message for _, message in WEIGHTS]
)
def test_weights_that_are_missing_unknown_or_others_are_named(
    changes, message, tmp_path
):
    weights = weights_of("nemo") | changes
    kept = {name: value for name, value in weights.items() if value is not None}
    refused(known.write_archive(tmp_path / "a.nemo", CASE, kept), message)


def test_an_archive_without_the_outputs_own_weight_is_whole(tmp_path):
    weights = weights_of("nemo")
    del weights[OUTPUT]
    loaded = load_checkpoint(known.write_archive(tmp_path / "a.nemo", CASE, weights))
    whole = load_checkpoint(archive(tmp_path / "b.nemo"))
    assert torch.equal(loaded.model.embedding.weight, whole.model.embedding.weight)


FOLDER = [
    ({"decoder_config__hidden_act": "gelu"}, "decoder_config.hidden_act: expected 'relu', got 'gelu'."),
    ({"decoder_config__num_attention_heads": 3}, "heads: expected a divisor of width=16, got 3."),
    ({"encoder_config__": None}, "is damaged (it has no 'encoder_config')"),
]  # fmt: skip


@pytest.mark.parametrize(
    "changes, message", FOLDER, ids=[next(iter(one)) for one, _ in FOLDER]
)
def test_a_folders_setting_that_asrkit_does_not_do_is_refused_by_name(
    changes, message, tmp_path
):
    refused(folder(tmp_path / "a", **changes), message)


def test_a_space_may_stand_before_the_prompt(tmp_path):
    space = [row[0] for row in known.one_vocabulary()].index("▁")
    loaded = load_checkpoint(folder(tmp_path / "a", decoder_start_token_id=space))
    assert PromptFormat.from_notes(loaded.notes).tokens()[:2] == [space, 7]


def test_a_folder_without_a_tokenizer_or_with_another_is_refused(tmp_path):
    path = folder(tmp_path / "a")
    text = (path / "tokenizer.json").read_text().replace("<|endoftext|>", "<end>")
    (path / "tokenizer.json").write_text(text)
    refused(
        path,
        "model: a is damaged (it has no '<|endoftext|>')",
    )
    (path / "tokenizer.json").unlink()
    refused(path, "model: a is damaged (it has no tokenizer.json)")


ODD = (None, -1, "x", [], {}, float("inf"), True, 10**9, [["a"]], {"a": 1}, 0)


def keys_of(config: dict, above: str = "") -> list[str]:
    """All keys of a config, those of a section behind its name and "__"."""
    found = []
    for key, value in config.items():
        found.append(above + key)
        if isinstance(value, dict):
            found += keys_of(value, f"{above}{key}__")
    return found


def test_odd_values_are_read_or_refused_in_one_line(tmp_path):
    weights, config = weights_of("nemo"), known.archive_config(CASE)
    kept = [
        key
        for key in keys_of(config)
        if not key.startswith(("encoder__", "preprocessor__"))
    ]
    read = 0
    for number, key in enumerate(kept):
        odd = changed(config, **{key: ODD[number % len(ODD)]})
        path = known.write_archive(tmp_path / "a.nemo", CASE, weights, odd)
        said = ""
        try:
            load_checkpoint(path)
            read += 1
        except ValueError as error:
            said = str(error)
        assert "\n" not in said and len(said) < 900, key
    assert 0 < read < len(kept)


def test_notes_whose_prompt_is_not_the_models_are_refused(tmp_path):
    loaded = load_checkpoint(archive(tmp_path / "a.nemo"))
    prompt = {
        **loaded.notes["prompt"],
        "ids": {**loaded.notes["prompt"]["ids"], "<|en|>": 999},
    }
    with pytest.raises(
        ValueError,
        match="prompt: expected tokens below 88, the size of the model's vocabulary, got 999",
    ):
        save_checkpoint(
            tmp_path / "b.safetensors", loaded._replace(notes={"prompt": prompt})
        )
