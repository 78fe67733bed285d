"""The models that notebooks share."""

from asrkit.data import Balanced, Random, at_most_seconds, plan, web_like
from asrkit.features import FeatureConfig
from asrkit.models import TransducerConfig, TransducerModel
from asrkit.models.checkpoints import Checkpoint, save_checkpoint
from asrkit.text import CharTokenizer
from asrkit.workbench.lessons.start_here.models import BatchedTraining, demo_model


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


def test_balanced_batches_are_found_that_make_about_as_many_steps_as_random_ones():
    lengths = web_like(400, seed=0)
    training = BatchedTraining(
        speech={}, lengths=lengths, config=None, passes=2, threads=1
    )
    random = Random(limit=at_most_seconds(120))
    steps = training.steps(random, seed=0)
    assert steps == sum(
        len(plan(random, lengths, seed=0, epoch=n).steps) for n in (0, 1)
    )
    balanced = training.balanced_with_steps(steps, 120, seed=0)
    assert abs(training.steps(balanced, seed=0) / steps - 1) < 0.15
    assert training.steps(Balanced(limit=at_most_seconds(120)), seed=0) < 0.85 * steps
