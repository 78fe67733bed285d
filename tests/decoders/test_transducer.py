"""Greedy transducer decoding: a model whose labels are known beforehand, a model that is not ours, and bad input."""

import inspect
import math
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from asrkit.decoders import transducer_greedy
from asrkit.decoders.states import select_state
from asrkit.decoders.transducer import STRATEGIES

NAMES = sorted(STRATEGIES)
Cell = namedtuple("Cell", "hidden")


class Scripted:
    """Emits, on each frame, the labels that the frame itself spells as digits; counts its calls."""

    blank = 9

    def __init__(self):
        self.joined = 0

    def predict(self, labels, state=None):
        counts = (
            torch.zeros(len(labels), dtype=torch.long) if state is None else state + 1
        )
        return counts[:, None], counts

    def join(self, encoded, predicted):
        self.joined += 1
        counts = predicted.expand(*encoded.shape[:-1], 1).flatten().tolist()
        logits = torch.zeros(len(counts), 10)
        for row, (frame, count) in enumerate(
            zip(encoded.flatten(0, -2).tolist(), counts, strict=True)
        ):
            start, spelled = int(frame[0]), [int(x) for x in frame[1:] if x >= 0]
            at = count - start
            logits[row, spelled[at] if 0 <= at < len(spelled) else self.blank] = 3
        return logits.view(*encoded.shape[:-1], 10)


def script(*utterances):
    """Frames (B, T, 5) for Scripted: labels emitted before this frame, then up to four labels; and lengths."""
    T = max(map(len, utterances))
    encoded = torch.full((len(utterances), T, 5), math.nan)
    for b, frames in enumerate(utterances):
        before = 0
        for t, spelled in enumerate(frames):
            encoded[b, t] = torch.tensor(
                [before, *map(int, spelled), *[-1] * (4 - len(spelled))]
            )
            before += len(spelled)
    return encoded.nan_to_num(0), torch.tensor([len(frames) for frames in utterances])


@pytest.mark.parametrize("strategy", NAMES)
def test_a_scripted_model_is_followed_to_the_letter(strategy):
    encoded, lengths = script(["1", "", "23", ""], ["", "", ""], [], ["4567"])
    found = transducer_greedy(Scripted(), encoded, lengths, strategy=strategy)
    assert found.tokens() == [[1, 2, 3], [], [], [4, 5, 6, 7]]
    assert found.frames.tolist() == [[0, 2, 2, -1], [-1] * 4, [-1] * 4, [0, 0, 0, 0]]
    each = 3 - math.log(
        math.exp(3) + 9
    )  # every step of a script has the same log-probability; blanks count too
    torch.testing.assert_close(found.scores, torch.tensor([7.0, 3, 0, 5]) * each)
    assert found.impl == strategy


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(("max_symbols", "wanted", "steps"), [
    (1, [4], 1), (2, [4, 5], 2), (4, [4, 5, 6, 7], 4), (5, [4, 5, 6, 7], 5), (10, [4, 5, 6, 7], 5)])  # fmt: skip
def test_max_symbols_ends_a_frame_without_a_blank_in_the_score(
    strategy, max_symbols, wanted, steps
):
    found = transducer_greedy(
        Scripted(), *script(["4567"]), strategy=strategy, max_symbols=max_symbols
    )
    assert found.tokens() == [wanted]
    torch.testing.assert_close(
        found.scores, torch.tensor([steps * (3 - math.log(math.exp(3) + 9))])
    )


def test_frame_looping_calls_the_joint_as_often_as_the_most_talkative_utterance_needs():
    utterances = (["12", "", "3"], ["", "456", ""], ["", "", ""])
    together = Scripted()
    transducer_greedy(together, *script(*utterances), strategy="frame_looping")
    assert (
        together.joined == 3 + 4 + 2
    )  # labels of the longest, and one blank, at each frame
    alone = Scripted()
    transducer_greedy(alone, *script(*utterances), strategy="one_by_one")
    assert alone.joined == (3 + 3) + (3 + 3) + 3


@pytest.mark.parametrize("strategy", NAMES)
def test_the_score_is_the_log_probability_of_the_path(make, speak, strategy):
    model, (encoded, _) = make("foreign", 3), speak("foreign", 1, 6, 3)
    found = transducer_greedy(
        model, encoded, torch.tensor([6]), strategy=strategy, max_symbols=3
    )
    steps = list(zip(found.labels[0].tolist(), found.frames[0].tolist(), strict=True))
    predicted, state = model.predict(torch.tensor([model.blank]))
    total = 0.0
    for t in range(6):
        here = [label for label, frame in steps if frame == t]
        for label in here + [model.blank] * (len(here) < 3):
            total += (
                model.join(encoded[:, t], predicted).log_softmax(-1)[0, label].item()
            )
            if label != model.blank:
                predicted, state = model.predict(torch.tensor([label]), state)
    assert found.scores.item() == pytest.approx(total, abs=1e-4)
    assert len(steps) > 0


def bare(**more):
    """A user's model at its smallest: all else that a decoder asks for is an AttributeError.

    Frame t is the number t. On frames 0, 3, 6 and so on it says one label: 0, 1, 2, 0 and so on; its state is how many it said.
    """

    def predict(labels, state):
        count = torch.zeros(len(labels), 1) if state is None else state + 1
        return count, count

    def join(encoded, predicted):
        speaks = (encoded % 3 == 0) & (encoded >= 3 * predicted)
        logits = [speaks & (predicted % 3 == label) for label in range(3)] + [~speaks]
        return torch.cat(
            [*logits, *(speaks == (span > 0) for span in more.get("durations", ()))], -1
        ).float()

    return SimpleNamespace(blank=3, predict=predict, join=join, **more)


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(
    ("more", "jump"), [({}, 0), ({"durations": (0, 3)}, 3), ({"durations": ()}, 0)]
)
def test_a_users_model_needs_blank_predict_and_join_and_nothing_else(
    strategy, more, jump
):
    frames = torch.arange(10.0).expand(2, 10)[..., None]
    found = transducer_greedy(
        bare(**more),
        frames,
        torch.tensor([10, 5]),
        strategy=strategy,
        confidence=True,
    )
    assert found.tokens() == [[0, 1, 2, 0], [0, 1]]
    assert found.frames.tolist() == [[0, 3, 6, 9], [0, 3, -1, -1]]
    assert found.durations.tolist() == [[jump] * 4, [jump, jump, -1, -1]]


@pytest.mark.parametrize(
    ("more", "frames_a_look"), [({}, 8), ({"durations": (0, 1)}, 2)]
)
def test_a_look_takes_in_8_frames_of_rnnt_and_2_of_tdt_unless_told_otherwise(
    more, frames_a_look
):
    model, looked, silence = bare(**more), [], torch.ones(1, 48, 1)
    join = model.join
    model.join = lambda encoded, predicted: (
        looked.append(encoded.shape[1]) or join(encoded, predicted)
    )
    for options in ({}, {"window": 3}):
        assert transducer_greedy(
            model, silence, torch.tensor([48]), **options
        ).tokens() == [[]]
    assert looked == [frames_a_look] * (48 // frames_a_look) + [3] * 16


def test_states_may_be_any_nest_and_are_replaced_only_where_told():
    old = {"a": (torch.zeros(3, 2), None), "b": [Cell(torch.zeros(3, 1, 2))]}
    new = {"a": (torch.ones(3, 2), None), "b": [Cell(torch.ones(3, 1, 2))]}
    mixed = select_state(torch.tensor([True, False, True]), new, old)
    assert mixed["a"][0].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert mixed["a"][1] is None
    assert isinstance(mixed["b"][0], Cell)
    assert mixed["b"][0].hidden[:, 0, 0].tolist() == [1, 0, 1]
    with pytest.raises(
        ValueError,
        match=r"^state: expected tensors in tuples, lists or dicts, got int\.$",
    ):
        select_state(torch.tensor([True]), (1,), (2,))


def test_strategies_share_one_signature_and_results_may_serve_a_loss():
    signatures = [inspect.signature(decode) for decode in STRATEGIES.values()]
    assert all(signature == signatures[0] for signature in signatures)
    for strategy in NAMES:
        found = transducer_greedy(Scripted(), *script(["12", "3"]), strategy=strategy)
        assert not any(
            part.is_inference()
            for part in (found.labels, found.frames, found.lengths, found.scores)
        )
