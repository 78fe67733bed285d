"""Greedy transducer decoding: a model with scripted labels, and a user's own model."""

import math
from types import SimpleNamespace

import pytest
import torch

from asrkit.decoders import transducer_greedy
from asrkit.decoders.transducer import STRATEGIES

NAMES = sorted(STRATEGIES)
SURE = 3 - math.log(math.exp(3) + 9)  # log-probability of each step of a script


class Scripted:
    """Emits on each frame the labels that the frame spells as digits; counts its calls."""

    blank = 9

    def __init__(self):
        self.joined = 0

    def predict(self, labels, state=None):
        counts = torch.zeros_like(labels) if state is None else state + 1
        return counts[:, None], counts

    def join(self, encoded, predicted):
        self.joined += 1
        counts = predicted.expand(*encoded.shape[:-1], 1).flatten().tolist()
        logits = torch.zeros(len(counts), 10)
        frames = encoded.flatten(0, -2).tolist()
        for row, ((start, *digits), count) in enumerate(
            zip(frames, counts, strict=True)
        ):
            spelled = [int(digit) for digit in digits if digit >= 0]
            at = count - int(start)
            logits[row, spelled[at] if 0 <= at < len(spelled) else self.blank] = 3
        return logits.view(*encoded.shape[:-1], 10)


def script(*utterances):
    """Frames (B, T, 5) for Scripted: labels emitted before this frame, then up to four labels; and lengths."""
    T = max(map(len, utterances))
    encoded = torch.zeros(len(utterances), T, 5)
    for b, frames in enumerate(utterances):
        before = 0
        for t, spelled in enumerate(frames):
            digits = [*map(int, spelled), *[-1] * (4 - len(spelled))]
            encoded[b, t] = torch.tensor([before, *digits])
            before += len(spelled)
    return encoded, torch.tensor([len(frames) for frames in utterances])


@pytest.mark.parametrize("strategy", NAMES)
def test_a_scripted_model_gives_exactly_its_labels(strategy):
    encoded, lengths = script(["1", "", "23", ""], ["", "", ""], [], ["4567"])
    found = transducer_greedy(Scripted(), encoded, lengths, strategy=strategy)
    assert found.tokens() == [[1, 2, 3], [], [], [4, 5, 6, 7]]
    assert found.frames.tolist() == [[0, 2, 2, -1], [-1] * 4, [-1] * 4, [0, 0, 0, 0]]
    # blanks count too
    wanted = torch.tensor([7.0, 3, 0, 5]) * SURE
    torch.testing.assert_close(found.scores, wanted)
    assert found.impl == strategy
    assert not any(part.is_inference() for part in found.parts())  # a loss takes them


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(
    ("max_symbols", "wanted", "steps"),
    [(1, [4], 1), (4, [4, 5, 6, 7], 4), (5, [4, 5, 6, 7], 5)],
)
def test_max_symbols_ends_a_frame_without_a_blank_in_the_score(
    strategy, max_symbols, wanted, steps
):
    how = {"strategy": strategy, "max_symbols": max_symbols}
    found = transducer_greedy(Scripted(), *script(["4567"]), **how)
    assert found.tokens() == [wanted]
    torch.testing.assert_close(found.scores, torch.tensor([steps * SURE]))


def test_frame_looping_calls_the_joint_as_often_as_the_utterance_with_most_labels_needs():
    utterances = script(["12", "", "3"], ["", "456", ""], ["", "", ""])
    together = Scripted()
    alone = Scripted()
    transducer_greedy(together, *utterances, strategy="frame_looping")
    # labels of the longest, and one blank, at each frame
    assert together.joined == 3 + 4 + 2
    transducer_greedy(alone, *utterances, strategy="one_by_one")
    assert alone.joined == (3 + 3) + (3 + 3) + 3


def bare(**more):
    """The smallest model of a user: any other attribute is an AttributeError.

    Frame t is the number t. On frames 0, 3, 6, ... it emits one label: 0, 1, 2, 0, ...; its state counts them.
    """

    def predict(labels, state):
        count = torch.zeros(len(labels), 1) if state is None else state + 1
        return count, count

    def join(encoded, predicted):
        speaks = (encoded % 3 == 0) & (encoded >= 3 * predicted)
        logits = [speaks & (predicted % 3 == label) for label in range(3)] + [~speaks]
        spans = [speaks == (span > 0) for span in more.get("durations", ())]
        return torch.cat(logits + spans, -1).float()

    return SimpleNamespace(blank=3, predict=predict, join=join, **more)


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(
    ("more", "jump"), [({}, 0), ({"durations": (0, 3)}, 3), ({"durations": ()}, 0)]
)
def test_a_users_model_needs_blank_predict_and_join_and_nothing_else(
    strategy, more, jump
):
    frames = torch.arange(10.0).expand(2, 10)[..., None]
    how = {"strategy": strategy, "confidence": True}
    found = transducer_greedy(bare(**more), frames, torch.tensor([10, 5]), **how)
    assert found.tokens() == [[0, 1, 2, 0], [0, 1]]
    assert found.frames.tolist() == [[0, 3, 6, 9], [0, 3, -1, -1]]
    assert found.durations.tolist() == [[jump] * 4, [jump, jump, -1, -1]]


@pytest.mark.parametrize(
    ("more", "options", "frames_a_look"),
    [
        ({}, {}, 8),
        ({"durations": (0, 1)}, {}, 2),
        ({}, {"window": 3}, 3),
        ({}, {"window": 10**12}, 48),
    ],
)
def test_the_default_window_is_8_frames_for_rnnt_and_2_for_tdt(
    more, options, frames_a_look
):
    model = bare(**more)
    looked = []

    def join(encoded, predicted, join=model.join):
        looked.append(encoded.shape[1])
        return join(encoded, predicted)

    model.join = join
    silence = torch.ones(1, 48, 1), torch.tensor([48])
    assert transducer_greedy(model, *silence, **options).tokens() == [[]]
    assert looked == [frames_a_look] * (48 // frames_a_look)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_a_function_that_calls_a_decoder_can_be_compiled(make, speak):
    model = make("foreign", 1, durations=(0, 1))
    encoded, lengths = speak("foreign", 2, 3, 1)

    def labels(frames):
        return transducer_greedy(model, 2 * frames, lengths).labels + 1

    compiled = torch.compile(labels, backend="eager")
    assert torch.equal(compiled(encoded), labels(encoded))
