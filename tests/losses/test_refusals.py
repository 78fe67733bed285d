"""Refusals: one line that names the argument, what was expected and got, and possibly a remedy."""

import pytest
import torch

from asrkit.losses import (
    ctc_loss,
    rnnt_loss,
    rnnt_loss_lean,
    rnnt_loss_packed,
    split_batches,
    tdt_loss,
)

INTEGERS = {
    "targets": torch.tensor([[0, 1], [2, 3]]),
    "logit_lengths": torch.tensor([4, 3]),
    "target_lengths": torch.tensor([2, 1]),
}
HALVES = {
    "encoded": torch.zeros(2, 4, 8),
    "predicted": torch.zeros(2, 3, 8),
}
OUTPUT = {
    "weight": torch.zeros(5, 8),
    "bias": torch.zeros(5),
    "activation": "relu",
}
CTC = {
    "log_probs": torch.zeros(1, 4, 3).log_softmax(-1),
    "targets": torch.tensor([[0, 1]]),
    "logit_lengths": torch.tensor([4]),
    "target_lengths": torch.tensor([2]),
}


def no_joint(encoded, predicted):
    raise AssertionError("the joint runs after the checks")


GOOD = {
    rnnt_loss: INTEGERS | {"logits": torch.zeros(2, 4, 3, 5)},
    tdt_loss: INTEGERS | {"logits": torch.zeros(2, 4, 3, 7), "durations": (0, 1)},
    rnnt_loss_packed: INTEGERS | {"logits": torch.zeros(18, 5)},
    split_batches: INTEGERS | HALVES | {"joint": no_joint, "size": 2},
    rnnt_loss_lean: INTEGERS | HALVES | OUTPUT,
    ctc_loss: CTC,
}
OVER = "overwrite_logits"
ADVANCE = "Blank must be able to advance."
TURNED = torch.zeros(2, 3, 4, 5).transpose(1, 2)
REFUSALS = [
    (
        rnnt_loss,
        {"logits": torch.zeros(2, 4, 5)},
        "logits: expected shape (B, T, U1, V), got (2, 4, 5).",
    ),
    (
        rnnt_loss,
        {"logits": torch.zeros(2, 4, 3, 5).long()},
        "logits: expected floating point, got torch.int64.",
    ),
    (
        rnnt_loss,
        {"targets": torch.zeros(2, 3).long()},
        "targets: expected shape (B=2, U=2), got (2, 3). logits have U1 = U + 1 rows, one more than the labels.",
    ),
    (
        rnnt_loss,
        {"targets": torch.tensor([[0, 1], [4, 3]])},
        "targets: expected labels 0..4 but blank=4, got 4 in utterance 1.",
    ),
    (
        rnnt_loss,
        {"targets": torch.tensor([[0, 5], [2, 3]])},
        "targets: expected labels 0..4 but blank=4, got 5 in utterance 0.",
    ),
    (
        rnnt_loss,
        {"logit_lengths": torch.tensor([4, 5])},
        "logit_lengths: expected 1 to T=4 frames, got 5 in utterance 1.",
    ),
    (
        rnnt_loss,
        {"target_lengths": torch.tensor([3, 1])},
        "target_lengths: expected 0 to U=2 labels, got 3 in utterance 0.",
    ),
    (
        rnnt_loss,
        {"logit_lengths": [4, 3]},
        "logit_lengths: expected a tensor, got list. Wrap it in torch.as_tensor.",
    ),
    (rnnt_loss, {"blank": 5}, "blank: expected an index of V=5 tokens, got 5."),
    (
        rnnt_loss,
        {"reduction": "all"},
        "reduction: expected one of 'none', 'mean', 'sum', got 'all'.",
    ),
    (
        rnnt_loss,
        {"fastemit_lambda": -1},
        "fastemit_lambda: expected a finite number, at least 0, got -1.",
    ),
    (
        rnnt_loss,
        {"logits": torch.zeros(2, 4, 3, 5).double(), "impl": "numba_cpu"},
        "logits: expected float32, float16 or bfloat16 with impl='numba_cpu', got torch.float64. Pass impl='auto'.",
    ),
    (
        rnnt_loss,
        {"impl": "triton"},
        "logits: expected a cuda tensor with impl='triton', got cpu.",
    ),
    (
        tdt_loss,
        {"impl": "numba_cuda"},
        "impl: expected one of 'auto', 'reference', 'wavefront', 'numba_cpu', 'triton', got 'numba_cuda'.",
    ),
    (
        rnnt_loss,
        {"fastemit_lambda": 0.1, "impl": "torchaudio"},
        "fastemit_lambda: expected 0 with impl='torchaudio', got 0.1. Pass impl='wavefront'.",
    ),
    (
        rnnt_loss,
        {OVER: True, "impl": "reference"},
        f"{OVER}: expected False with impl='reference', got True. Pass impl='auto'.",
    ),
    (
        rnnt_loss,
        {OVER: True, "logits": TURNED},
        f"logits: expected contiguous with {OVER}=True, got (60, 5, 20, 1).",
    ),
    (
        tdt_loss,
        {"durations": (0,)},
        f"durations: expected a list or tuple of distinct whole numbers, one of them above 0, got (0,). {ADVANCE}",
    ),
    (tdt_loss, {"omega": 1.5}, "omega: expected a probability, got 1.5."),
    (
        rnnt_loss_packed,
        {"logits": torch.zeros(24, 5)},
        "logits: expected N=18 rows, the sum of T (U + 1), got 24. Pass the lengths that the joint was packed with.",
    ),
    (
        split_batches,
        {"size": 0},
        "size: expected a number of utterances, at least 1, got 0.",
    ),
    (
        rnnt_loss_lean,
        {"predicted": torch.zeros(2, 3, 8).double()},
        "predicted: expected torch.float32, as encoded, got torch.float64.",
    ),
    (
        rnnt_loss_lean,
        {"predicted": torch.zeros(2, 2, 8)},
        "targets: expected shape (B=2, U=1), got (2, 2). predicted has U1 = U + 1 rows, one more than the labels.",
    ),
    (
        rnnt_loss_lean,
        {"weight": torch.zeros(5, 7)},
        "weight: expected shape (V, D=8), got (5, 7).",
    ),
    (
        rnnt_loss_lean,
        {"encoded": torch.zeros(2, 4)},
        "encoded: expected shape (B, T, D), got (2, 4).",
    ),
    (
        rnnt_loss_lean,
        {"activation": "gelu"},
        "activation: expected one of 'relu', 'tanh', got 'gelu'.",
    ),
    (rnnt_loss_lean, {"dropout": 1}, "dropout: expected a probability below 1, got 1."),
    (
        rnnt_loss_lean,
        {"impl": "triton"},
        "encoded: expected a cuda tensor with impl='triton', got cpu.",
    ),
    (
        ctc_loss,
        {"log_probs": CTC["log_probs"].half()},
        "log_probs: expected float32 or float64, got torch.float16. Pass log_probs.float().",
    ),
    (
        ctc_loss,
        {"logit_lengths": torch.tensor([5])},
        "logit_lengths: expected 1 to T=4 frames, got 5 in utterance 0.",
    ),
]


@pytest.mark.parametrize(("loss", "change", "message"), REFUSALS)
def test_a_refusal_is_one_line(loss, change, message):
    with pytest.raises(ValueError) as error:
        loss(**GOOD[loss] | change)
    assert str(error.value) == message
