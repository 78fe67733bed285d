"""Evaluation beside training: the scores of evaluation in turn, and an error where it cannot be had."""

import functools
import os
import re
import signal

import pytest
import torch
from torch import nn

from asrkit.training import Beside


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


RAISES, DIES = 1000.0, 2000.0  # a first bias that makes an evaluation do this


def score(rows, scored):
    """Mean output, and the process that computed it."""
    assert not scored.training
    what = scored[0].bias[0].item()
    if what == RAISES:
        raise ZeroDivisionError("on purpose")
    if what == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.linspace(-1, 1, 6 * rows).view(rows, 6)
    return scored(x).double().mean().item(), os.getpid()


SCORE = functools.partial(score, 50)


def that(what):
    made = model()
    with torch.no_grad():
        made[0].bias[0] = what
    return made


def train_a_step(trained, optimizer):
    trained(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is of POSIX")
def test_scores_are_those_in_turn_bit_for_bit_and_a_failure_is_an_error(one_thread):
    trained = model().train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
    in_turn = {}
    with Beside(SCORE, trained, every=2) as beside:
        for step in range(1, 8):
            train_a_step(trained, optimizer)
            beside.after_step(step, trained)
            if step % 2 == 0:
                in_turn[step] = SCORE(trained.eval())[0]
                trained.train()
        assert beside.poll().keys() <= {2, 4, 6}
        scores = beside.collect()
        assert {step: value for step, (value, _) in scores.items()} == in_turn
        assert len(set(in_turn.values())) == 3  # the weights did change
        process = beside._process
        assert {pid for _, pid in scores.values()} == {process.pid} != {os.getpid()}

        beside.submit(8, that(RAISES))
        with pytest.raises(
            RuntimeError, match=r"(?s)^evaluation: step 8 failed:.*on purpose"
        ):
            beside.collect()
        beside.submit(9, trained)
        assert beside.collect().keys() == {2, 4, 6, 9}

        beside.submit(10, that(DIES))
        ended = r"^evaluation: its process ended \(-9\) before step 10 was scored\.$"
        with pytest.raises(RuntimeError, match=ended):
            beside.submit(12, trained)
    assert not process.is_alive()


def test_weights_that_shared_memory_cannot_hold_are_a_line_with_the_remedy():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError) as error:
            Beside(SCORE, model())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    said = r"evaluation: the weights do not fit into /dev/shm \(.*\). Enlarge it \(docker run --shm-size"
    assert re.match(said, str(error.value))
