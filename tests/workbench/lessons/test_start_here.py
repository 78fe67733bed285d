"""Texts compared word by word, and the models that notebooks share."""

import pytest

from asrkit.features import FeatureConfig
from asrkit.models import TransducerConfig, TransducerModel
from asrkit.models.checkpoints import Checkpoint, save_checkpoint
from asrkit.text import CharTokenizer
from asrkit.workbench.lessons.start_here import bare_words, compared, demo_model


@pytest.mark.parametrize(("name", "durations"), [("demo", ()), ("demo_tdt", (0, 1, 2))])
def test_a_model_in_the_cache_is_loaded_and_not_trained(
    tmp_path, monkeypatch, name, durations
):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    tokenizer = CharTokenizer()
    config = TransducerConfig(vocab_size=tokenizer.vocab_size, durations=durations)
    model = TransducerModel(config)
    checkpoint = Checkpoint(model, tokenizer, vars(FeatureConfig()), {"step": 7})
    (tmp_path / name).mkdir()
    save_checkpoint(tmp_path / name / "model.safetensors", checkpoint)
    loaded = demo_model(seconds=60, durations=durations)
    assert loaded.notes["step"] == 7
    assert tuple(loaded.model.durations) == durations


def test_bare_words_have_neither_capitals_nor_punctuation():
    assert (
        bare_words("He's ill-disposed, Mr. X\n(of 1811)!")
        == "he's ill disposed mr x of"
    )


@pytest.mark.parametrize(
    ("hypothesis", "text"),
    [
        ("she put her down", "she put her down"),
        ("she cut her down", "she <del>put</del> <ins>cut</ins> her down"),
        ("she put down", "she put <del>her</del> down"),
        ("so she put her down", "<ins>so</ins> she put her down"),
        ("", "<del>she put her down</del>"),
    ],
)
def test_words_are_struck_out_and_underlined_where_texts_differ(hypothesis, text):
    assert compared("she put her down", hypothesis) == text


def test_what_html_would_read_is_escaped():
    assert compared("a < b", "a > b") == "a <del>&lt;</del> <ins>&gt;</ins> b"
