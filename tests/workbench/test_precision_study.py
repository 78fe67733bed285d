"""What a precision costs a model in words and log-probabilities, beside float32 and with an interval."""

from collections import Counter
from dataclasses import asdict

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from asrkit.cpu import has_int8
from asrkit.data import batches
from asrkit.features import FeatureConfig
from asrkit.models import (
    Checkpoint,
    CTCConfig,
    CTCModel,
    FastConformerConfig,
    TransducerConfig,
    TransducerModel,
)
from asrkit.models.packed_conformer import PackedFastConformer
from asrkit.text import CharTokenizer
from asrkit.workbench.precision_study import precision_costs

pytestmark = pytest.mark.skipif(not has_int8(), reason="needs a CPU with VNNI or AMX")
CONFORMER = FastConformerConfig(width=32, layers=2, subsampling=4, subsampling_channels=8)


def checkpoint(spoiled=False):
    """A CTC model of random weights that never writes blanks."""
    torch.manual_seed(0)
    model = CTCModel(CTCConfig(vocab_size=28, encoder=CONFORMER)).eval().requires_grad_(False)
    model.output.bias[-1] = -10
    if spoiled:  # one activation so large that the others are lost
        for block in model.encoder.blocks:
            for _, wide, _, _, narrow in block.feed:
                wide.bias[0] = 1e5
                narrow.weight[:, 0] = 1e-5
    return Checkpoint(model, CharTokenizer(), asdict(FeatureConfig()), {})


def test_float32_costs_nothing_and_int8_more_log_probability_than_bfloat16(tiny_speech):
    plain, half, int8 = precision_costs(checkpoint(), tiny_speech)
    assert (plain.more, plain.low, plain.high, plain.other_texts) == (0, 0, 0, 0)
    assert plain.log_prob_error == 0 < half.log_prob_error < int8.log_prob_error < 0.1
    for one in (half, int8):
        assert one.low <= one.more <= one.high
        assert one.more == pytest.approx(one.errors.rate - plain.errors.rate)


def test_a_model_that_int8_spoils_writes_other_texts(tiny_speech):
    _, good = precision_costs(checkpoint(), tiny_speech, ["int8"])
    _, bad = precision_costs(checkpoint(spoiled=True), tiny_speech, ["int8"])
    assert bad.other_texts > len(tiny_speech) / 2
    assert bad.log_prob_error > 10 * good.log_prob_error


@pytest.mark.parametrize("ctc", [True, False])
def test_of_a_transducer_the_ctc_head_is_asked_where_it_has_one(tiny_speech, ctc):
    torch.manual_seed(0)
    config = TransducerConfig(vocab_size=28, encoder=CONFORMER, ctc=ctc)
    model = TransducerModel(config).eval().requires_grad_(False)
    transducer = Checkpoint(model, CharTokenizer(), asdict(FeatureConfig()), {"max_symbols": 2})
    plain, int8 = precision_costs(transducer, tiny_speech, ["int8"])
    if ctc:
        assert plain.log_prob_error == 0 < int8.log_prob_error < 0.1
    else:
        assert plain.log_prob_error is None and int8.log_prob_error is None


def test_each_precision_encodes_a_batch_once(tiny_speech):
    calls = Counter()

    def count(module, given, found):
        if isinstance(module, PackedFastConformer):
            calls["encoder"] += 1

    hook = register_module_forward_hook(count)
    try:
        precision_costs(checkpoint(), tiny_speech, ["int8"], batch_seconds=20.0)
    finally:
        hook.remove()
    made = batches(tiny_speech, CharTokenizer(), batch_seconds=20.0, order="sorted")
    assert calls["encoder"] == 2 * len([*made]) > 2
