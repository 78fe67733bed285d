"""The models that notebooks share."""

import pytest

from asrkit.features import FeatureConfig
from asrkit.models import TransducerConfig, TransducerModel
from asrkit.models.checkpoints import Checkpoint, save_checkpoint
from asrkit.text import CharTokenizer
from asrkit.workbench.lessons.start_here import demo_model


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
