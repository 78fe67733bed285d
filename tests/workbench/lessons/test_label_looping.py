"""Who works and who waits, on a planted batch whose paths are known."""

import numpy as np
import pytest

from asrkit.workbench.bench.planted import planted
from asrkit.workbench.lessons.label_looping import (
    FINISHED,
    WAITING,
    WORKING,
    states,
    waiting_share,
    waits_for,
    watch,
)


@pytest.fixture(scope="module")
def plan():
    return planted(3, 24, V=33, width=180)


@pytest.fixture(scope="module")
def path(plan):
    return watch(plan.model, plan.encoded, plan.lengths, strategy="one_by_one").steps


def test_one_by_one_computes_a_row_a_step_of_the_paths(plan, path):
    watched = watch(plan.model, plan.encoded, plan.lengths, strategy="one_by_one")
    assert watched.rows == len(path) == plan.joints()
    assert {b for b, _, _ in path} == {0, 1, 2}


def test_every_step_is_computed_once_as_work_and_nobody_waits_in_windowed_looping(
    plan, path
):
    for strategy in ("frame_looping", "label_looping", "windowed_looping"):
        watched = watch(plan.model, plan.encoded, plan.lengths, strategy=strategy)
        assert watched.steps >= path
        of = states(watched, path)
        assert of.shape == (3, len(watched.joint_calls))
        works = (of == WORKING).sum()
        if strategy == "windowed_looping":
            assert waiting_share(of) == 0 and works < len(path)
        else:
            assert waiting_share(of) > 0 and works == len(path)


def test_waiting_is_charged_to_those_who_work():
    of = np.array(
        [
            [WORKING, WORKING, WORKING],
            [WAITING, WORKING, FINISHED],
            [WAITING, WAITING, 0],
        ]
    )
    shares = waits_for(of)
    assert shares.sum() == (of == WAITING).sum() == 3
    assert shares[2].tolist() == [1.5, 0.5, 0.0] and shares[1].tolist() == [
        1.0,
        0.0,
        0.0,
    ]
