"""The likeliest CTC alignment of given labels, against every possible path, and its absence."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import ctc_alignment, ctc_beam, ctc_greedy

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import as_draft

V = 4  # labels 0, 1, 2 and the blank
TEXTS = [[], [0], [0, 0], [0, 1], [2, 2, 1], [1, 0, 1, 2], [0, 0, 0]]


def scores_of(B, T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)


def collapsed(path):
    return [token for token, _ in itertools.groupby(path) if token != V - 1]


def nats(log_probs, path):
    return sum(log_probs[t, token].item() for t, token in enumerate(path))


def best_of_all(log_probs, labels):
    """Log-probability of the likeliest of all V^T paths of `labels`; -inf if there is none."""
    paths = itertools.product(range(V), repeat=len(log_probs))
    own = (nats(log_probs, path) for path in paths if collapsed(path) == labels)
    return max(own, default=-math.inf)


def path_of(frames, durations, labels, T):
    """The token of each frame in an alignment."""
    path = [V - 1] * T
    for label, frame, duration in zip(labels, frames, durations, strict=False):
        path[frame : frame + duration] = [label] * duration
    return path


@pytest.mark.parametrize("T", [1, 2, 4, 5])
def test_it_is_the_likeliest_of_all_paths_of_the_labels(T):
    log_probs = scores_of(len(TEXTS), T, seed=T)
    lengths = torch.tensor([T - row % 2 for row in range(len(TEXTS))])
    found = ctc_alignment(log_probs, lengths, as_draft(TEXTS))
    for row, labels in enumerate(TEXTS):
        length = int(lengths[row])
        frames = found.frames[row].tolist()
        durations = found.durations[row].tolist()
        wanted = best_of_all(log_probs[row, :length], labels)
        assert found.scores[row].item() == pytest.approx(wanted, abs=1e-12)
        if wanted == -math.inf:
            assert {*frames, *durations} == {-1}
            continue
        path = path_of(frames, durations, labels, length)
        assert len(path) == length
        assert collapsed(path) == labels
        assert nats(log_probs[row], path) == pytest.approx(wanted, abs=1e-12)
        assert set(frames[len(labels) :]) <= {-1}


@pytest.mark.parametrize("decode", [ctc_greedy, ctc_beam])
def test_a_text_of_ctc_gets_the_times_of_its_own_decoder(decode):
    log_probs = scores_of(6, 30)
    lengths = torch.tensor([30, 29, 7, 1, 0, 30])
    greedy = decode(log_probs, lengths)
    found = ctc_alignment(log_probs, lengths, greedy)
    assert torch.equal(found.frames, greedy.frames)
    assert torch.equal(found.durations, greedy.durations)
    if decode is ctc_greedy:  # the likeliest path of all
        torch.testing.assert_close(found.scores, greedy.scores)
    assert not any(part.is_inference() for part in found)


def test_padding_has_no_influence_and_the_blank_may_be_any_index():
    log_probs = scores_of(2, 8)
    lengths = torch.tensor([8, 5])
    labels = as_draft([[0, 1], [2, 2]])
    wanted = ctc_alignment(log_probs, lengths, labels)
    noisy = log_probs.clone()
    noisy[1, 5:] = math.nan
    found = ctc_alignment(noisy, lengths.int(), labels)
    moved = as_draft([[1, 2], [3, 3]])
    first = ctc_alignment(log_probs.roll(1, -1), lengths, moved, blank=0)
    for other in (found, first):
        for one, two in zip(other, wanted, strict=True):
            assert torch.equal(one, two)


def test_an_utterance_with_nan_has_no_alignment():
    log_probs = scores_of(2, 8)
    log_probs[0, 3] = math.nan
    found = ctc_alignment(log_probs, torch.tensor([8, 8]), as_draft([[0], [0]]))
    assert found.scores.isfinite().tolist() == [False, True]
    assert found.frames[:, 0].ge(0).tolist() == [False, True]


def frame_by_frame(log_probs, labels):
    """First frames, durations and score of the likeliest path; all moves are kept."""
    N = len(labels)
    tokens = torch.full((2 * N + 1,), V - 1)
    tokens[1::2] = torch.tensor(labels)
    repeats = tokens == tokens.roll(2)  # and blanks, which none skips to
    score = log_probs.new_full((2 * N + 1,), -math.inf)
    score[0] = 0
    moves = []
    for row in log_probs.where(log_probs.isfinite(), -math.inf):
        before = torch.nn.functional.pad(score, (2, 0), value=-math.inf)
        skip = before[:-2].masked_fill(repeats, -math.inf)
        best, move = torch.stack([score, before[1:-1], skip]).max(
            0
        )  # of equals the first
        score = best + row[tokens]
        moves.append(move.to(torch.int8))
    state = 2 * N - int(N > 0 and score[-2] > score[-1])
    total = score[state].item()
    if total == -math.inf:
        return [-1] * N, [-1] * N, total
    path = [state]
    for move in reversed(moves):
        path.append(path[-1] - int(move[path[-1]]))
    path = path[-2::-1]
    odd = range(1, 2 * N, 2)
    return (
        [path.index(state) for state in odd],
        [path.count(state) for state in odd],
        total,
    )


@pytest.mark.parametrize(
    "T, N", [(1, 0), (1, 1), (2, 3), (40, 25), (200, 60), (5000, 500), (3000, 2995)]
)
def test_it_equals_the_plain_search_frame_by_frame(T, N):
    """Equal paths, labels without probability, NaN and infinities, texts that are too long, and
    texts whose moves do not fit into one block of memory.
    """
    generator = torch.Generator().manual_seed(T)
    # sums are exact, many are equal, and they grow from frame to frame
    log_probs = scores_of(6, T, seed=T).mul(4).round() / 4 + 4
    broken = torch.rand(log_probs.shape, generator=generator) < 0.05 / T**0.5
    for n, value in enumerate((math.nan, math.inf, -math.inf), 1):
        log_probs[n::3][broken[n::3]] = value
    lengths = torch.tensor([T, T, T - 1, T // 2, 0, T])
    steps = torch.randint(1, V - 1, (N,), generator=generator)
    texts = [(steps.cumsum(0) % (V - 1)).tolist()]  # no two equal labels in a row
    for n in (N, N // 2, N // 3, 0, 2 * N):
        texts.append(torch.randint(V - 1, (n,), generator=generator).tolist())
    found = ctc_alignment(log_probs, lengths, as_draft(texts))
    for row, (text, length) in enumerate(zip(texts, lengths.tolist(), strict=True)):
        wanted = frame_by_frame(log_probs[row, :length], text)
        own = [part[row, : len(text)].tolist() for part in found[:2]]
        assert (*own, found.scores[row].item()) == wanted


LONG = """
import resource, torch
from asrkit.decoders import Hypotheses, ctc_alignment

def align(log_probs, N):
    text = Hypotheses.from_lists([[(n % 3, 0, 0) for n in range(N)]], [torch.zeros(())], "by hand")
    return ctc_alignment(log_probs, torch.tensor([log_probs.shape[1]]), text)

log_probs = torch.randn(1, 60_000, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
align(log_probs[:, :100], 10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
frames = align(log_probs, 4000).frames[0]
assert bool(frames.diff().gt(0).all())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="ru_maxrss has other units elsewhere"
)
def test_many_labels_and_frames_take_little_memory():
    """A bit for each state and frame would be 60 MB; measured are 8."""
    done = subprocess.run(
        [sys.executable, "-c", LONG], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 25_000  # KiB


def test_scores_of_half_precision_are_of_float32():
    log_probs = scores_of(1, 300).bfloat16()
    labels = as_draft([[0, 1, 2] * 30])
    found = ctc_alignment(log_probs, torch.tensor([300]), labels)
    wanted = ctc_alignment(log_probs.double(), torch.tensor([300]), labels)
    assert found.scores.dtype == torch.float32
    torch.testing.assert_close(found.scores.double(), wanted.scores, rtol=1e-5, atol=0)
