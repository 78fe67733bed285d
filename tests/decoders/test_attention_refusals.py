"""Bad calls of the decoders by attention: one line that names the argument, and no error of torch."""

import math
import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import Suppressing, aed_beam, aed_greedy

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import V, heard, random_model, same
from attention_oracle import aed_beam_reference

DOORS = {"greedy": aed_greedy, "beam": aed_beam}


def log_probs_of_ctc(seed=0):
    """Log-probabilities of a CTC head about 3 utterances of 6 frames."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 6, V + 1, dtype=torch.float64, generator=generator)
    return scores.log_softmax(-1)


def refused(message, call, *given, **options):
    """Expect ValueError with a message that begins so, in one line."""
    with pytest.raises(ValueError) as error:
        call(*given, **options)
    text = str(error.value)
    assert text.startswith(message), text
    assert "\n" not in text


DTYPE = "encoded: expected torch.float64, as the model's weights are, got torch.float32. Pass "
NO_PROMPT = "prompt: expected 1 to 31 tokens, so that a label fits in most=32, got 0."
EVERY_DOOR = [
    ({"encoded": torch.zeros(3, 6, 8)}, DTYPE),
    ({"prompt": []}, NO_PROMPT),
    ({"prompt": [[], [], []]}, NO_PROMPT),
]
BEAM = [
    (
        {"ctc": log_probs_of_ctc()[..., 1:]},
        f"ctc: expected shape (B=3, T=6, V={V + 1}), got (3, 6, {V})",
    ),
    ({"ctc": log_probs_of_ctc()[:, 1:]}, "ctc: "),
    (
        {"ctc": log_probs_of_ctc(), "ctc_weight": 1.5},
        "ctc_weight: expected a share from 0 to 1, got 1.5",
    ),
    ({"ctc": log_probs_of_ctc(), "ctc_weight": math.nan}, "ctc_weight: "),
]


@pytest.mark.parametrize("name", DOORS)
def test_bad_calls_of_every_door(name):
    encoded, lengths = heard(3, 6)
    for change, wanted in EVERY_DOOR:
        call = {"encoded": encoded, "lengths": lengths} | change
        refused(wanted, DOORS[name], random_model(), **call)
    quiet = Suppressing(random_model(), always=[3], first=[], prompt_tokens=1)
    refused(DTYPE, DOORS[name], quiet, encoded.float(), lengths)


@pytest.mark.parametrize(("options", "wanted"), BEAM)
def test_bad_options_of_the_beam(options, wanted):
    refused(wanted, aed_beam, random_model(), *heard(3, 6), **options)


def test_texts_longer_than_the_positions_are_refused():
    model = random_model()
    long = torch.ones(1, 33, dtype=torch.int64)
    for call in (model.logits, model.looks):
        wanted = "tokens: expected 1 to most=32 of them, got 33."
        refused(wanted, call, *heard(1, 6), long)


def test_where_ctc_has_no_weight_a_beam_finds_what_attention_alone_finds():
    encoded, lengths = heard(3, 6)
    model = random_model()
    alone = aed_beam(model, encoded, lengths)
    for search in (aed_beam, aed_beam_reference):
        same(
            search(model, encoded, lengths, ctc=log_probs_of_ctc(), ctc_weight=0), alone
        )


@pytest.mark.parametrize("ctc_weight", [0.3, 1.0])
def test_nan_of_ctc_is_no_empty_text_that_came_to_its_end(ctc_weight):
    encoded, _ = heard(3, 6)
    lengths = torch.tensor([6, 4, 5])
    ctc = log_probs_of_ctc()
    ctc[0, 5, 3] = torch.nan
    ctc[1, 4:] = torch.nan  # padding
    model = random_model()
    options = {"ctc_weight": ctc_weight}
    found = aed_beam(model, encoded, lengths, ctc=ctc, **options)
    same(found, aed_beam_reference(model, encoded, lengths, ctc=ctc, **options))
    whole = aed_beam(model, encoded, lengths, ctc=log_probs_of_ctc(), **options)
    assert found.tokens()[1:] == whole.tokens()[1:]
    assert found.tokens()[0] == []
    assert found.scores[0] == -torch.inf and not found.ended[0]
