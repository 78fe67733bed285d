"""The ladder: every rung finds the planted labels; wrong order, lengths, numbers and lost batches are detected."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from asrkit.transcribe import Recognizer
from asrkit.workbench.lessons.shared import file_recognizer
from asrkit.workbench.lessons.shared import ladder as lesson
from asrkit.workbench.lessons.shared.file_recognizer import (
    FileRecognizer,
    Variant,
    VariantRecognizer,
)
from asrkit.workbench.lessons.shared.ladder import (
    BASELINE,
    LOOP_RUNGS,
    ladder_arms,
    ladder_comparison,
    published_gains,
)
from asrkit.workbench.lessons.shared.scripted import scripted
from asrkit.workbench.measure.comparison import check
from benchmarks.harness.table import table
from benchmarks.suites import ladder

KINDS = {
    what: ladder.config_of("tiny", durations)
    for what, durations in ladder.KINDS.items()
}
SAMPLES = [16_000, 40_000, 25_001, 33_333, 8_000]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Five scripted utterances a kind of model, in batches of two."""
    return {
        what: scripted(config, SAMPLES, tmp_path_factory.mktemp(what), batch=2)
        for what, config in KINDS.items()
    }


@pytest.fixture(autouse=True)
def fast_bfloat16(monkeypatch):
    """All rungs of a CPU, also where bfloat16 is emulated."""
    monkeypatch.setattr(lesson, "fast_dtype", lambda device: "bfloat16")


def test_no_rung_emulates_bfloat16(tasks, monkeypatch):
    monkeypatch.setattr(lesson, "fast_dtype", lambda device: "float32")
    lines = []
    arms = ladder_arms(tasks["ladder-ctc"], log=lines.append)
    assert {arm.config.precision for arm in arms.values()} == {"float32"}
    needs = "is left out: needs instructions for bfloat16"
    assert {f"{rung} {needs}" for rung in ("autocast", "bfloat16")} < {*lines}


@pytest.mark.parametrize("what", KINDS)
def test_every_rung_finds_the_planted_labels(tasks, what):
    task = tasks[what]
    lines = []
    arms = ladder_arms(task, log=lines.append)
    assert sum(map(len, task.labels)) > 10
    for name, arm in arms.items():
        assert arm().tokens() == task.labels, name
    left_out = {"graph_whole": "a GPU"}
    if what == "ladder-ctc":
        left_out = dict.fromkeys(LOOP_RUNGS, "a transducer")
    assert lines == [
        f"{rung.replace('_', ' ')} is left out: needs {lacks}"
        for rung, lacks in left_out.items()
    ]
    check(ladder_comparison(what, task, arms, {}, quick=True))


def test_files_in_memory_are_read_only_by_the_constructor(tasks, monkeypatch):
    task = replace(tasks["ladder-rnnt"], in_memory=True)
    recognizer = FileRecognizer(task, BASELINE)
    monkeypatch.setattr(file_recognizer, "read_wav", None)
    assert recognizer().tokens() == task.labels
    assert {*recognizer.stage_ms()} == {*file_recognizer.STAGES}


def shortened(samples):
    return samples[:-801]


def rows_swapped(found):
    return found[0].flip(0), found[1]


def scaled(found):
    return 1.5 * found[0], found[1]


def a_frame_longer(found):
    return found[0], (found[1] + 1).clamp(max=found[0].shape[1])


def a_frame_shorter(found):
    return found[0], found[1] - 1


def not_a_number(found):
    found[0][-1, :8] = torch.nan
    return found


MISTAKES = [  # owner and name of a function, mistake in its result
    (file_recognizer, "read_wav", shortened),
    (VariantRecognizer, "features", scaled),
    (VariantRecognizer, "features", a_frame_longer),
    (Recognizer, "encode", a_frame_shorter),
    (Recognizer, "encode", not_a_number),
    (FileRecognizer, "encode", rows_swapped),
]


def spoil(monkeypatch, owner, name, mistake):
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: mistake(plain(*arguments)))


@pytest.mark.parametrize("owner, name, mistake", MISTAKES)
def test_a_pipeline_with_a_mistake_is_not_measured(
    tasks, owner, name, mistake, monkeypatch
):
    task = tasks["ladder-rnnt"]
    fast = replace(BASELINE, order="by_length", strategy="windowed_looping")
    plain = FileRecognizer(task, BASELINE)
    case = ladder_comparison("x", task, {"baseline": plain}, {}, quick=True)
    right = plain()
    spoil(monkeypatch, owner, name, mistake)
    arms = {"right": lambda: right, "wrong": FileRecognizer(task, fast)}
    with pytest.raises(AssertionError, match="disagrees with right"):
        check(replace(case, arms=arms, ratios=[]))


def test_the_script_catches_a_mistake_that_all_arms_share(tasks, monkeypatch):
    task = tasks["ladder-tdt"]
    arms = ladder_arms(task)
    spoil(monkeypatch, *MISTAKES[0])
    with pytest.raises(
        AssertionError, match="baseline finds other labels than planted"
    ):
        ladder_comparison("ladder-tdt", task, arms, {}, quick=True)


def test_the_quick_suite_has_every_rung_with_its_config_and_its_least_work(tasks):
    for (what, task), case in zip(
        tasks.items(), ladder.suite("cpu", True), strict=True
    ):
        climbed = ladder_arms(task)
        assert case.what == f"{what}-tiny"
        assert [*case.arms] == [*climbed]
        pairs = {*product(["baseline"], [*climbed][1:]), ("to_autocast", "to_bfloat16")}
        assert {*case.pairs()} >= pairs
        assert case.params["utterances"] == 4
        assert case.params["audio_s"] == pytest.approx(8, abs=0.5)
        gains = published_gains(what.removeprefix("ladder-"))
        for name, params in case.arm_params.items():
            assert params.get("published") == gains.get(name)
            assert Variant(**params["pipeline"]) == climbed[name].config
            assert min(params["least_ms"], params["floor_FLOP"]) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("what", KINDS)
def test_every_rung_says_what_the_script_says_on_a_gpu(tmp_path, what):
    task = scripted(KINDS[what], SAMPLES, tmp_path, batch=2, device="cuda")
    for name, arm in ladder_arms(task).items():
        for _ in range(2):  # graphs are captured, then replayed
            assert arm().tokens() == task.labels, name


def test_the_table_has_the_gains_of_a_step_and_its_published_one():
    shared = {"what": "ladder-rnnt", "impl": "to_x", "metric": "ratio", "unit": "1"}
    found = [
        shared | {"value": value, "params": {"arms": [slow], "published": "9×"}}
        for slow, value in (("baseline", 2.0), ("to_w", 1.5))
    ]
    _, head, line = table(found)
    assert head.split("  ")[-3:] == [
        "of the baseline",
        "of the step before",
        "published",
    ]
    assert line.split() == ["to_x", "2", "1.5", "9×"]
    gains = published_gains("rnnt")
    assert gains["to_label_looping"] == "2.0× (label-looping-2x)"
