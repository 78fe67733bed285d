"""Texts compared word by word, and the models that notebooks share."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asrkit.features import FeatureConfig
from asrkit.models import ConvConfig, CTCConfig, TransducerConfig, TransducerModel
from asrkit.models.checkpoints import Checkpoint, save_checkpoint
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, train
from asrkit.workbench.lessons.start_here import (
    bare_words,
    compared,
    demo_folder,
    demo_model,
)

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks/00_start_here.ipynb"


def a_demo(durations=()):
    """A checkpoint of step 7."""
    tokenizer = CharTokenizer()
    config = TransducerConfig(vocab_size=tokenizer.vocab_size, durations=durations)
    model = TransducerModel(config)
    return Checkpoint(model, tokenizer, vars(FeatureConfig()), {"step": 7})


@pytest.mark.parametrize(("name", "durations"), [("demo", ()), ("demo_tdt", (0, 1, 2))])
def test_a_model_in_the_cache_is_loaded_and_not_trained(
    tmp_path, monkeypatch, name, durations
):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    (tmp_path / name).mkdir()
    save_checkpoint(tmp_path / name / "model.safetensors", a_demo(durations))
    loaded = demo_model(seconds=60, durations=durations)
    assert loaded.notes["step"] == 7
    assert tuple(loaded.model.durations) == durations


def test_a_demo_whose_training_was_cut_short_is_none_and_the_next_one_begins_anew(
    tmp_path, monkeypatch, tiny_speech, one_thread
):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    tokenizer, encoder = CharTokenizer(), ConvConfig(width=8, layers=1)
    config = CTCConfig(vocab_size=tokenizer.vocab_size, encoder=encoder)

    def train_demo(on_step):
        with demo_folder() as place:
            settings = TrainConfig(steps=4, seconds=600, checkpoint_s=0)
            options = {"progress": False, "config": settings, "on_step": on_step}
            train(config, tokenizer, tiny_speech, out=place, **options)

    def stop(history):
        if len(history) == 3:
            raise KeyboardInterrupt

    model = tmp_path / "demo/model.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train_demo(stop)
    assert list(tmp_path.rglob("state.pt")), "of step 2"
    assert not model.exists()
    train_demo(lambda history: None)
    whole = model.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        train_demo(stop)
    assert model.read_bytes() == whole


def test_a_second_process_waits_for_the_demo_of_the_first_and_takes_it(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    errors = ""
    with ThreadPoolExecutor() as pool, demo_folder() as place:
        second = pool.submit(demo_model, seconds=60)
        while "Waiting for the demo" not in errors:
            assert not second.done(), second.exception()
            errors += capfd.readouterr().err
        place.mkdir()
        save_checkpoint(place / "model.safetensors", a_demo())
    assert second.result().notes["step"] == 7
    errors += capfd.readouterr().err
    assert errors.count("Waiting") == 1 and "holds it" in errors


def test_notebook_00_reads_a_manifest_of_ones_own_before_it_trains():
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = ["".join(one["source"]) for one in cells if one["cell_type"] == "code"]
    (training,) = [n for n, source in enumerate(code) if "train(" in source]
    (reading,) = [n for n, source in enumerate(code) if "from_manifest" in source]
    assert reading < training
    names = {"real_manifest": "nowhere.jsonl"}
    exec(code[0], names)
    parameters = code[1].replace('real_manifest: str = ""', "")
    exec(parameters, names)
    with pytest.raises(ValueError, match="manifest: expected a file or a folder"):
        exec(code[reading], names)


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
