"""The models that notebooks share."""

from asrkit.features import FeatureConfig
from asrkit.models import TransducerConfig, TransducerModel
from asrkit.models.checkpoints import Checkpoint, save_checkpoint
from asrkit.text import CharTokenizer
from asrkit.workbench.lessons.start_here import demo_model


def test_a_model_in_the_cache_is_loaded_and_not_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    tokenizer = CharTokenizer()
    for name, durations in (("demo", ()), ("demo_tdt", (0, 1, 2))):
        config = TransducerConfig(vocab_size=tokenizer.vocab_size, durations=durations)
        features = vars(FeatureConfig())
        checkpoint = Checkpoint(
            TransducerModel(config), tokenizer, features, {"step": 7}
        )
        (tmp_path / name).mkdir()
        save_checkpoint(tmp_path / name / "model.safetensors", checkpoint)
    loaded = demo_model(seconds=60)
    sibling = demo_model(seconds=60, durations=(0, 1, 2))
    assert loaded.notes["step"] == 7 and not loaded.model.durations
    assert tuple(sibling.model.durations) == (0, 1, 2)
