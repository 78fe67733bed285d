"""Evaluation in the background: scores equal those in turn, and failures raise errors."""

import functools
import os
import re
import signal

import pytest
import torch
from torch import nn

from asrkit.training import BackgroundEvaluation


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


RAISES, DIES = 1000.0, 2000.0  # values of the first bias that make an evaluation fail


def score(rows, scored):
    """Mean output, and the process that computed it."""
    assert not scored.training
    bias = scored[0].bias[0].item()
    if bias == RAISES:
        raise ZeroDivisionError("on purpose")
    if bias == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.linspace(-1, 1, 6 * rows).view(rows, 6)
    return scored(x).double().mean().item(), os.getpid()


SCORE = functools.partial(score, 50)


def model_with_bias(bias):
    failing = model()
    with torch.no_grad():
        failing[0].bias[0] = bias
    return failing


def train_a_step(trained, optimizer):
    trained(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL needs POSIX")
def test_scores_equal_those_in_turn_bit_for_bit_and_failures_raise(one_thread):
    trained = model().train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
    in_turn = {}
    with BackgroundEvaluation(SCORE, trained) as background:
        for step in range(1, 8):
            train_a_step(trained, optimizer)
            if step % 2 == 0:
                background.submit(step, trained)
                in_turn[step] = SCORE(trained.eval())[0]
                trained.train()
        assert background.poll().keys() <= {2, 4, 6}
        scores = background.collect()
        assert {step: value for step, (value, _) in scores.items()} == in_turn
        assert len(set(in_turn.values())) == 3  # the weights did change
        process = background._process
        assert {pid for _, pid in scores.values()} == {process.pid} != {os.getpid()}

        background.submit(8, model_with_bias(RAISES))
        with pytest.raises(
            RuntimeError, match=r"(?s)^evaluation: step 8 failed:.*on purpose"
        ):
            background.collect()
        background.submit(9, trained)
        assert background.collect().keys() == {2, 4, 6, 9}

        background.submit(10, model_with_bias(DIES))
        ended = r"^evaluation: its process ended \(-9\) before step 10 was scored\.$"
        with pytest.raises(RuntimeError, match=ended):
            background.submit(12, trained)
    assert not process.is_alive()


def test_weights_too_large_for_shared_memory_raise_with_a_remedy():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError) as error:
            BackgroundEvaluation(SCORE, model())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    wanted = r"evaluation: the weights do not fit into /dev/shm \(.*\). Enlarge it \(docker run --shm-size"
    assert re.match(wanted, str(error.value))
