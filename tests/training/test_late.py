"""What is read late or scored beside is what is read at once and scored in turn."""

import json
import math
from dataclasses import replace

import pytest
import torch

from asrkit.models import ConvConfig, StatelessConfig, TransducerConfig
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, train
from asrkit.training.reading import Reading
from asrkit.training.steplog import StepLog

TOKENIZER = CharTokenizer()
SMALL = TransducerConfig(
    vocab_size=TOKENIZER.vocab_size,
    encoder=ConvConfig(width=24, layers=1),
    predictor=StatelessConfig(width=24),
    joint_width=24,
)
CONFIG = TrainConfig(
    steps=6, seconds=math.inf, batch_seconds=6.0, checkpoint_s=0.0, evaluate_s=0.0, threads=1
)


def run(speech, out, config=CONFIG, **options):
    return train(
        SMALL, TOKENIZER, speech, speech, out=out, config=config, progress=False, **options
    )


def of_steps(history):
    """What the clock does not change."""
    names = ("step", "loss", "lr", "gradient_norm", "lean")
    return [{name: line[name] for name in names} for line in history]


def test_a_log_that_is_read_a_step_late_and_scores_from_beside_are_the_same(
    tiny_speech, tmp_path, monkeypatch
):
    at_once = run(tiny_speech, tmp_path / "at_once")
    seen = []
    init = StepLog.__init__

    def late(self, *arguments):
        init(self, *arguments)
        self.late = True  # as on a GPU

    monkeypatch.setattr(StepLog, "__init__", late)
    sparse = replace(CONFIG, checkpoint_s=1e9, evaluate="beside")
    apart = run(tiny_speech, tmp_path / "late", sparse, on_step=lambda log: seen.append(len(log)))
    assert of_steps(apart.history) == of_steps(at_once.history)
    assert seen == [1, 2, 3, 4, 5, 6]
    lines = (tmp_path / "late/log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == apart.history
    assert apart.dev == at_once.dev
    again = run(tiny_speech, tmp_path / "late", sparse)  # a finished run is scored
    assert again.dev == at_once.dev and again.history == apart.history


def test_a_reading_holds_the_numbers_of_its_moment():
    number = torch.tensor(1.5)
    reading = Reading(number, torch.tensor(float("inf"), dtype=torch.float64))
    number.add_(1)
    assert reading.values() == [1.5, math.inf]


@pytest.mark.gpu
def test_on_a_gpu_a_reading_waits_for_nothing_until_it_is_asked():
    from asrkit.workbench.profiling import host_reads

    numbers = [torch.full((), value, device="cuda") for value in (1.5, 2.5)]
    readings = []
    assert host_reads(lambda: readings.append(Reading(*numbers)), device="cuda") == {}
    assert readings[0].values() == [1.5, 2.5]


def test_another_way_to_evaluate_is_refused():
    with pytest.raises(ValueError) as caught:
        TrainConfig(evaluate="never")
    assert str(caught.value) == "evaluate: expected one of 'in turn', 'beside', got 'never'."
