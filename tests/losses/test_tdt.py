"""The TDT loss: published values, brute force, its limits, its own features; see test_transducers.py for the rest."""

import math
import sys
from pathlib import Path

import pytest
import torch

from asrkit.losses import rnnt_loss, tdt_loss

sys.path.insert(0, str(Path(__file__).parent))
from ragged import graded, lattice

EXACT = ["reference", "wavefront"]
every = pytest.mark.parametrize("impl", [*EXACT, "numba_cpu"])


def drawn(impl, seed, *sizes, n=5):
    dtype = torch.float32 if impl == "numba_cpu" else torch.float64
    return lattice(seed, *sizes, n=n, dtype=dtype)


def one(logits, targets, **options):
    """The loss of an utterance that fills its tensors."""
    labels = torch.tensor([targets], dtype=torch.long)
    frames = torch.tensor([logits.shape[1]])
    counts = torch.tensor([len(targets)])
    return tdt_loss(logits, labels, frames, counts, **options).item()


SINE = torch.arange(4.0 * 3 * 8).sin().view(1, 4, 3, 8)
PUBLISHED = [  # logits, targets, options, loss
    (
        torch.zeros(1, 3, 2, 7),
        [0],
        {"durations": (0, 1, 2), "sigma": 0.05},
        4.1557388251,
    ),
    (torch.zeros(1, 3, 2, 5), [0], {"durations": [1]}, 3.4657359028),
    (SINE, [1, 2], {"durations": (0, 1, 2), "blank": 4, "sigma": 0.05}, 7.0199886219),
    (SINE, [1, 2], {"durations": (1, 2, 3), "blank": 4}, 9.3554420589),
]


@every
@pytest.mark.parametrize(("logits", "targets", "options", "expected"), PUBLISHED)
def test_published_cases(impl, logits, targets, options, expected):
    actual = one(logits, targets, impl=impl, **options)
    assert actual == pytest.approx(expected, abs=1e-6)


SETS = [
    (1,),
    (0, 1),
    (0, 1, 2),
    (2, 1),
    (3, 0, 1, 4),
    (2, 3),
    (5, 1),
]


@pytest.mark.parametrize("durations", SETS)
@pytest.mark.parametrize(("T", "U"), [(1, 0), (1, 2), (4, 0), (3, 2), (5, 3)])
def test_the_loss_is_the_sum_over_all_paths(durations, T, U):
    V = 4
    sigma = 0.1
    logits, targets, *lengths = lattice(3, 1, T, U, V, n=len(durations))
    token_logp = logits[0, ..., :V].log_softmax(-1)
    tokens = (token_logp - sigma).tolist()
    duration_logp = logits[0, ..., V:].log_softmax(-1)
    tail = duration_logp.tolist()
    paths = []

    def walk(t, u, score):
        if (t, u) == (T, U):
            paths.append(score)
        for i, d in enumerate(durations if t < T else ()):
            here = score + tail[t][u][i]
            if d > 0 and t + d <= T:
                walk(t + d, u, here + tokens[t][u][-1])
            if u < U and t + d < T:
                label = targets[0, u]
                walk(t + d, u + 1, here + tokens[t][u][label])

    walk(0, 0, 0.0)
    expected = -torch.tensor(paths, dtype=torch.float64).logsumexp(0).item()
    options = {"durations": durations, "sigma": sigma}
    for impl, near in (("reference", 1e-12), ("wavefront", 1e-12), ("numba_cpu", 1e-6)):
        inputs = logits.float() if impl == "numba_cpu" else logits
        actual = tdt_loss(inputs, targets, *lengths, impl=impl, **options).item()
        assert actual == pytest.approx(expected, rel=near)


@every
def test_one_duration_of_one_frame_is_a_choice_of_frames(impl):
    # uniform logits: every path has T arcs, U of the first T - 1 are labels
    for T, U in [(1, 0), (6, 0), (6, 3), (9, 8)]:
        paths = math.comb(T - 1, U)
        expected = T * math.log(5) - math.log(paths)
        logits = torch.zeros(1, T, U + 1, 6)
        actual = one(logits, [0] * U, durations=(1,), impl=impl)
        assert actual == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("durations", [(0, 1, 2), (1, 3, 2)])
def test_reference_gradient_is_the_numerical_one(durations):
    logits, *rest = lattice(1, 2, 3, 1, 2, n=3)

    def loss(x):
        options = {"sigma": 0.1, "reduction": "none", "impl": "reference"}
        return tdt_loss(x, *rest, durations=durations, **options)

    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


@pytest.mark.parametrize("impl", EXACT)
def test_fastemit_scales_only_the_gradient_of_label_arcs(impl):
    logits, *rest = lattice(12, 2, 5, 3, 4, n=3)

    options = {"durations": (0, 1, 2), "impl": impl}
    cost, plain = graded(tdt_loss, logits, *rest, **options)
    same, scaled = graded(tdt_loss, logits, *rest, fastemit_lambda=0.5, **options)
    torch.testing.assert_close(same, cost, rtol=0, atol=0)
    extra = scaled - plain
    for b, U in enumerate(rest[2].tolist()):
        assert (extra[b].abs().sum() > 0.01) == (U > 0)
        assert extra[b, :, U:].abs().sum() < 1e-12  # no label is left there


@every
def test_an_utterance_without_a_path_costs_infinity_and_does_not_affect_the_others(
    impl,
):
    logits, targets, *_ = drawn(impl, 8, 2, 4, 1, 3, n=1)
    frames = torch.tensor([4, 3])
    labels = torch.tensor([1, 1])
    rest = targets, frames, labels
    cost, grad = graded(tdt_loss, logits, *rest, durations=(2,), impl=impl)
    assert cost[0] < cost[1] == math.inf
    assert grad[0].abs().sum() > 0.1
    assert (grad[1] == 0).all()
    short = torch.zeros(1, 1, 1, 5)
    assert one(short, [], durations=(2, 10**9), impl=impl) == math.inf


@every
def test_omega_of_one_is_the_transducer_loss_of_the_token_logits(impl):
    logits, *rest = drawn(impl, 13, 3, 6, 3, 4)
    options = {"fastemit_lambda": 0.2, "clamp": 0.3, "impl": impl}
    cost, grad = graded(tdt_loss, logits, *rest, omega=1.0, sigma=0.3, **options)
    tokens = logits[..., :4].clone()
    expected = graded(rnnt_loss, tokens, *rest, **options)
    actual = cost, grad[..., :4]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert (grad[..., 4:] == 0).all()


def test_omega_is_drawn_once_a_call_from_torchs_generator_and_zero_draws_nothing():
    logits, *rest = lattice(14, 2, 4, 2, 3, n=5, dtype=torch.float32)
    tdt = tdt_loss(logits, *rest).item()
    rnnt = rnnt_loss(logits[..., :3], *rest).item()
    torch.manual_seed(5)
    costs = [tdt_loss(logits, *rest, omega=0.25).item() for _ in range(60)]
    torch.manual_seed(5)
    drawn = [rnnt if torch.rand(()) < 0.25 else tdt for _ in range(60)]
    assert costs == drawn
    assert 5 < drawn.count(rnnt) < 25
    before = torch.get_rng_state()
    tdt_loss(logits, *rest)
    assert torch.equal(torch.get_rng_state(), before)
