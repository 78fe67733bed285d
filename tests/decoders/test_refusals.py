"""Bad calls of the decoders: the error is one line that names the argument."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asrkit.decoders import (
    Suppressing,
    aed_beam,
    aed_greedy,
    attention_frames,
    ctc_alignment,
    ctc_beam,
    ctc_greedy,
    transducer_greedy,
)

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import WIDTH, Story, V, as_draft, random_model


def speaker(**changes):
    """A transducer of plain functions: 5 tokens, of which 4 is the blank."""

    def predict(labels, state=None):
        return labels[:, None].float(), labels

    def join(encoded, predicted):
        shape = torch.broadcast_shapes(encoded.shape[:-1], predicted.shape[:-1])
        return torch.zeros(*shape, 5)

    return SimpleNamespace(**{"blank": 4, "predict": predict, "join": join} | changes)


def numbers(labels, state=None):
    """A prediction whose state is not a tensor."""
    return labels[:, None].float(), 1


def shrinks(labels, state=None):
    """A prediction that loses its batch after the first label."""
    return torch.zeros(3 if state is None else 1, 1), labels


FRAMES = {"encoded": torch.zeros(3, 4, WIDTH), "lengths": torch.tensor([4, 0, 2])}
SCORES = {"log_probs": torch.zeros(2, 3, 4), "lengths": torch.tensor([3, 2])}
CARRY = transducer_greedy(speaker(), **FRAMES).carry
GOOD = {
    transducer_greedy: {"model": speaker(), **FRAMES},
    aed_greedy: {"model": Story(), **FRAMES},
    aed_beam: {"model": Story(), **FRAMES},
    attention_frames: {"model": Story(), **FRAMES},
    ctc_greedy: SCORES | {"impl": "batched"},
    ctc_beam: SCORES,
    ctc_alignment: SCORES | {"hypotheses": as_draft([[0], [1]])},
    Suppressing: {
        "model": random_model(),
        "always": [],
        "first": [],
        "prompt_tokens": 1,
    },
}
WITHOUT_ROOM = (
    "prompt: expected 1 to 63 tokens, so that a label fits in max_tokens=64, got "
)
BYTES = torch.zeros(2, 3, 4).to(torch.float8_e4m3fn)
ONE_FRAME = speaker(join=lambda *_: torch.zeros(3, 1, 5))
GREEDY = [  # (changed arguments, start of the message)
    ({"strategy": ["label_looping"]}, "strategy: expected one of "),
    ({"max_symbols": 0}, "max_symbols: expected 1 to 1000 labels on a frame, got 0."),
    (
        {"graphs": "full"},
        "graphs: expected 'auto' or 'off' with windowed_looping on cpu, ",
    ),
    (
        {"carry": CARRY.select(slice(2))},
        "carry: expected B=3 utterances, got [2]. Regroup it",
    ),
    (
        {"model": Story()},
        "model: expected blank, predict, join, got Story without blank",
    ),
    (
        {"model": speaker(config=SimpleNamespace(joint_width=5))},
        f"encoded: expected frames of width 5, as model.join takes, got width {WIDTH}. Call model.encode first.",
    ),
    ({"model": speaker(blank=-1)}, "model.blank: expected an index from 0, got -1."),
    (
        {"model": speaker(blank=5)},
        "model.join: expected logits (3, 4, 'more than 5'), got ",
    ),
    (
        {"model": ONE_FRAME},
        "model.join: expected logits (3, 4, 'more than 4'), got (3, 1, 5).",
    ),
    (
        {"model": speaker(predict=lambda labels, state: torch.zeros(3, 1))},
        "model.predict: expected a pair of predictions (B, P) and the state of the predictor, or None, got Tensor",
    ),
    (
        {"model": speaker(predict=lambda labels, state: (labels, labels, labels))},
        "model.predict: expected a pair of predictions (B, P) and the state of the predictor, or None, got 3 values",
    ),
    (
        {"model": speaker(predict=shrinks)},
        "model.predict: expected shape (3, 1), as before, ",
    ),
    (
        {"model": speaker(predict=numbers)},
        "state: expected tensors in tuples, lists or dicts, ",
    ),
]
CTC = [
    (
        {"log_probs": BYTES},
        "log_probs: expected a float dtype of 16 bits or more, got ",
    ),
    (
        {"lengths": torch.tensor([2, 4])},
        "lengths: expected 0 to T=3 frames, got 2 to 4.",
    ),
    (
        {"lengths": torch.ones(2)},
        "lengths: expected int32 or int64, got torch.float32.",
    ),
    ({"blank": 4}, "blank: expected an index of V=4 tokens, got 4."),
    (
        {"impl": "cuda"},
        "impl: expected one of 'auto', 'batched', 'numba_cpu', got 'cuda'.",
    ),
]
CTC_BEAM = [
    ({"width": 0}, "width: expected 1 to 1000 hypotheses, got 0."),
    ({"nbest": 9}, "nbest: expected 1 to width=8 hypotheses, got 9."),
    (
        {"lm": "words.arpa"},
        "lm: expected a language model, or None, got str. Read a file by",
    ),
    ({"lm_weight": math.nan}, "lm_weight: expected a number from "),
]
ATTENTION = [
    (
        {"model": random_model()},
        "encoded: expected torch.float64, as the model's weights are",
    ),
    (
        {"model": speaker()},
        "model: expected bos, eos, max_tokens, vocab_size, prefill, ",
    ),
    ({"prompt": [1] * 64}, f"{WITHOUT_ROOM}64."),
    ({"prompt": []}, f"{WITHOUT_ROOM}0."),
    (
        {"prompt": [V]},
        f"prompt: expected tokens from 0 to below V={V}, got {V} to {V}.",
    ),
    (
        {"max_labels": 0},
        "max_labels: expected 1 to 63 labels, or None, got 0. The model has no more",
    ),
    (
        {"draft": [[3], [3], [3]]},
        "draft: expected Hypotheses, got list. Try ctc_greedy.",
    ),
]
ATTENTION_BEAM = [
    ({"ctc": torch.zeros(3, 4, V)}, f"ctc: expected shape (B=3, T=4, V={V + 1}), got "),
    (
        {"ctc": torch.zeros(3, 4, V + 1), "ctc_weight": 1.5},
        "ctc_weight: expected a share from 0 to 1, got 1.5",
    ),
]
OTHERS = as_draft([[0], [3]])
ROWS = [
    *((transducer_greedy, *row) for row in GREEDY),
    *((ctc_greedy, *row) for row in CTC),
    *((ctc_beam, *row) for row in CTC_BEAM),
    *((aed_greedy, *row) for row in ATTENTION),
    *((aed_beam, *row) for row in ATTENTION_BEAM),
    (
        ctc_alignment,
        {"hypotheses": OTHERS},
        "hypotheses: expected labels from 0 to below V=4, without the blank 3, got [3]",
    ),
    (
        attention_frames,
        {"hypotheses": OTHERS},
        "hypotheses: expected shape (B=3, N), got (2, 1)",
    ),
    (Suppressing, {"always": [V]}, f"always: expected tokens from 0 to below V={V}"),
]


@pytest.mark.parametrize(("door", "changes", "message"), ROWS)
def test_a_bad_call_is_one_line(door, changes, message):
    with pytest.raises(ValueError) as error:
        door(**GOOD[door] | changes)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
