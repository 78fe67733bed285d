"""Who works and who waits, on a planted batch whose paths are known."""

import numpy as np
import pytest

from asrkit.workbench.lessons.label_looping import (
    FINISHED,
    WAITING,
    WORKING,
    states,
    waiting_share,
    waits_for,
    watch,
)
from asrkit.workbench.lessons.shared.planted import planted


@pytest.fixture(scope="module")
def plan():
    return planted(3, 24, V=33, width=180)


def watched(plan, strategy):
    return watch(plan.model, plan.encoded, plan.lengths, strategy=strategy)


@pytest.fixture(scope="module")
def path(plan):
    return watched(plan, "one_by_one").steps


def test_one_by_one_computes_a_row_a_step_of_the_paths(plan, path):
    assert watched(plan, "one_by_one").rows == len(path) == plan.joints()
    assert {b for b, _, _ in path} == {0, 1, 2}


@pytest.mark.parametrize("strategy", ["frame_looping", "label_looping"])
def test_every_step_is_computed_once_as_work_and_some_wait(plan, path, strategy):
    decode = watched(plan, strategy)
    of = states(decode, path)
    assert decode.steps >= path
    assert of.shape == (3, len(decode.joint_calls))
    assert (of == WORKING).sum() == len(path)
    assert waiting_share(of) > 0


def test_nobody_waits_in_windowed_looping(plan, path):
    decode = watched(plan, "windowed_looping")
    of = states(decode, path)
    assert decode.steps >= path
    assert (of == WORKING).sum() < len(path)
    assert waiting_share(of) == 0


def test_waiting_is_charged_to_those_who_work():
    first = [WORKING, WORKING, WORKING]
    second = [WAITING, WORKING, FINISHED]
    third = [WAITING, WAITING, WORKING]
    shares = waits_for(np.array([first, second, third]))
    assert shares.tolist() == [[0, 0, 0], [1, 0, 0], [1.5, 0.5, 0]]
