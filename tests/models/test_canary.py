"""Readers of Canary: NeMo's archives and Hugging Face folders, what they refuse, and asrkit's own copies."""

import sys
from pathlib import Path

import pytest
import torch

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
from canary_files import OUTPUT, POSITIONS, archive, folder, weights_of
from published import GONE, expect_a_copy_to_be_the_same, refused


def pieces(rows) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(known.model_of_pieces(rows)).with_control()


def test_an_archive_becomes_the_model_of_its_config_and_so_does_its_copy(tmp_path):
    loaded = load_checkpoint(archive(tmp_path / "a.nemo"))
    encoder = FastConformerConfig(
        bins=80, width=16, layers=2, heads=2, subsampling=8, subsampling_channels=4, kernel=9,
        scale_input=False, dropout=0.1, dropout_attention=0.1, dropout_input=0.1,
    )  # fmt: skip
    assert loaded.model.config == AEDConfig(
        vocab_size=88, bos=4, eos=3, pad=2, encoder=encoder, width=16, layers=2, heads=4, most=known.MOST,
    )  # fmt: skip
    words = pieces(known.pieces())
    parts = ("spl_tokens", pieces(known.control_pieces())), ("en", words), ("de", words)
    assert loaded.tokenizer == AggregateTokenizer(parts)
    assert loaded.notes["target"] == "EncDecMultiTaskModel"
    assert not loaded.model.training
    prompt = PromptFormat.from_notes(loaded.notes)
    assert prompt.languages == ("en", "de")  # French has a token and no model
    # with numerals, as the archive says
    assert prompt.tokens() == [7, 4, 14, 18, 18, 5, 8, 11, 13]
    expect_a_copy_to_be_the_same(loaded, tmp_path)


def test_a_folder_becomes_the_model_of_its_config(tmp_path):
    loaded = load_checkpoint(folder(tmp_path / "a"))
    assert loaded.model.config.vocab_size == 56
    assert loaded.model.config.most == known.MOST
    prompt = PromptFormat.from_notes(loaded.notes)
    assert prompt.tokens() == [7, 4, 14, 18, 18, 5, 9, 11, 13]
    assert loaded.tokenizer.vocab_size == 52
    assert loaded.tokenizer.decode([18, 5, 22, 23, 2]) == "e"
    assert loaded.notes["source"].endswith(", canary")


def test_the_first_prompt_and_its_defaults_are_read(tmp_path):
    slots = {"source_lang": "de", "pnc": "no", "decodercontext": None}
    turns = [{"role": "user", "slots": slots}]
    changes = {"prompt_format": "canary", "prompt_defaults": turns}
    loaded = load_checkpoint(archive(tmp_path / "a.nemo", changes))
    prompt = PromptFormat.from_notes(loaded.notes)
    assert prompt.tokens() == [4, 17, 15, 17, 6]
    assert prompt.tokens(task="translate", punctuation=True) == [4, 17, 16, 18, 5]


def test_a_longer_table_of_positions_is_cut_and_the_output_may_be_missing(
    tmp_path,
):
    table = weights_of()[POSITIONS]
    grown = torch.cat([table, torch.zeros(8, table.shape[1])])
    weights = {POSITIONS: grown, OUTPUT: GONE}
    model = load_checkpoint(archive(tmp_path / "a.nemo", weights=weights)).model
    assert torch.equal(model.positions, table)
    whole = load_checkpoint(archive(tmp_path / "b.nemo")).model
    assert torch.equal(model.embedding.weight, whole.embedding.weight)


def defaults(**slots):
    return {"prompt_defaults": [{"role": "user", "slots": slots}]}


CONFIG = [
    ({"prompt_format": "plain"}, "prompt_format: expected one of ['canary', 'canary2'], got 'plain'."),
    ({"transf_decoder.config_dict.pre_ln": GONE}, "transf_decoder.config_dict.pre_ln: expected True, got False."),
    ({"transf_decoder.config_dict.learn_positional_encodings": True}, "config_dict.learn_positional_encodings: expected False"),
    ({"transf_decoder.config_dict.num_layers": 10**4}, "model: expected at most"),
    ({"transf_decoder.config_dict.max_sequence_length": 9}, "prompt: expected fewer tokens than the model's 9 positions, got 9."),
    ({"tokenizer.langs.en.model_path": "nemo:other.model"}, "a.nemo is damaged (it has no 'other.model')"),
    (defaults(decodercontext="well"), "prompt_defaults.decodercontext: expected '', got 'well'."),
    (defaults(emotion="<|emo:odd|>"), "prompt: expected a token for each of its places, got none for ['<|emo:odd|>']."),
    (defaults(source_lang="fr"), "prompt.language: expected one of 'en', 'de', got 'fr'."),
]  # fmt: skip
LAYER = "transf_decoder._decoder.layers.1."
WEIGHTS = [
    ({f"{LAYER}first_sub_layer.key_net.bias": GONE}, "a.nemo is damaged (it has no 'layers.1.self_attention.k.bias')"),
    ({f"{LAYER}third_sub_layer.gate.bias": torch.zeros(2)}, 'Unexpected key(s) in state_dict: "layers.1.third_sub_layer.gate.bias"'),
    ({POSITIONS: torch.zeros(9, 16)}, "size mismatch for positions"),
    ({OUTPUT: torch.zeros(88, 16)}, "output.weight: expected the weights of the embedding, to which it is tied, got others."),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", CONFIG)
def test_an_unsupported_setting_is_refused(changes, message, tmp_path):
    refused(archive(tmp_path / "a.nemo", changes), message)


@pytest.mark.parametrize("weights, message", WEIGHTS)
def test_weights_that_are_missing_or_others_are_named(weights, message, tmp_path):
    refused(archive(tmp_path / "a.nemo", weights=weights), message)


def test_a_folder_of_another_activation_or_tokenizer_is_refused(tmp_path):
    path = folder(tmp_path / "a", {"decoder_config.hidden_act": "gelu"})
    refused(path, "decoder_config.hidden_act: expected 'relu', got 'gelu'.")
    path = folder(tmp_path / "a")
    text = (path / "tokenizer.json").read_text().replace("<|endoftext|>", "<end>")
    (path / "tokenizer.json").write_text(text)
    refused(path, "model: a is damaged (it has no '<|endoftext|>')")


def test_a_space_may_precede_the_prompt(tmp_path):
    space = [row[0] for row in known.one_vocabulary()].index("▁")
    loaded = load_checkpoint(folder(tmp_path / "a", {"decoder_start_token_id": space}))
    assert PromptFormat.from_notes(loaded.notes).tokens()[:2] == [space, 7]


def test_notes_whose_prompt_is_not_the_models_are_refused(tmp_path):
    loaded = load_checkpoint(archive(tmp_path / "a.nemo"))
    loaded.notes["prompt"]["ids"]["<|en|>"] = 999
    with pytest.raises(ValueError, match="^prompt: expected tokens below 88, .* 999"):
        save_checkpoint(tmp_path / "b.safetensors", loaded)
