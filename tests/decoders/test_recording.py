"""The turns of the loops can be recorded: nothing in them waits, on fake GPU tensors too."""

import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from asrkit.decoders import transducer_greedy
from asrkit.decoders.states import map_state
from asrkit.decoders.transducer.graph_loop import LOOPS, GraphLoop
from asrkit.decoders.transducer.steps import GreedyModel, GreedyOptions
from asrkit.gpu_waits import CaptureGuard
from asrkit.models import (
    ConvConfig,
    LSTMConfig,
    StatelessConfig,
    TransducerConfig,
    TransducerModel,
)
from asrkit.workbench.lessons.shared.planted import planted
from asrkit.workbench.measure import launch_profile
from asrkit.workbench.measure.ops import count_launches, listening


def ours(kind, durations=()):
    predictor = LSTMConfig(width=8, layers=2)
    if kind == "stateless":
        predictor = StatelessConfig(width=8)
    config = TransducerConfig(
        vocab_size=9,
        encoder=ConvConfig(width=4, layers=1),
        predictor=predictor,
        joint_width=8,
        durations=durations,
    )
    return TransducerModel(config).eval()


def turn_of(model, device, confidence=True, **options):
    """The turn of a loop on `device`, as a capture records it."""

    def there(part):
        return torch.zeros(part.shape, dtype=part.dtype, device=device)

    with torch.inference_mode():
        carry = GreedyModel(model).initial_carry(torch.zeros(4, 16, 8))
        carry = map_state(there, carry)
        for module in model.modules():
            for name, value in module.named_parameters(recurse=False):
                # .to cannot move fakes
                module._parameters[name] = nn.Parameter(there(value))
        encoded = torch.zeros(4, 16, 8, device=device)
        greedy = GreedyModel(model, confidence, encoded.device)
        loop = GraphLoop(4, 16, greedy, encoded, carry, GreedyOptions(**options))
        loop.load(encoded, torch.full((4,), 16, device=device), carry)
    return torch.inference_mode()(lambda: loop.turn(greedy))


OURS = pytest.mark.parametrize(
    ("kind", "durations"),
    [
        ("stateless", ()),
        ("lstm", ()),
        ("lstm", (0, 1, 2, 4, 8)),
    ],
)


STRATEGIES = pytest.mark.parametrize("strategy", LOOPS)


@OURS
@STRATEGIES
def test_a_turn_never_waits(kind, durations, strategy):
    for confidence in (False, True):
        model = ours(kind, durations)
        turn = turn_of(model, "cpu", confidence, strategy=strategy)
        assert launch_profile(turn).syncs == 0
        with CaptureGuard():
            turn()


@OURS
@STRATEGIES
def test_a_turn_on_a_gpu_takes_few_launches_no_tensor_of_the_host_and_no_size_from_the_device(
    kind, durations, strategy
):
    own = {"window": 4, "strategy": strategy}
    with FakeTensorMode():
        turn = turn_of(ours(kind, durations), "cuda", **own)
        with listening("cuda") as listener:
            turn()
    found = count_launches(listener.ops)
    assert found.syncs == 0
    most = {"frame_looping": 58, "label_looping": 104, "windowed_looping": 70}[strategy]
    joints = 4 if strategy == "label_looping" else 1
    most += 6 * (kind == "lstm") + 5 * joints * bool(durations)
    assert 0.8 * most < found.launches <= most, found.ops
    # what a GPU runs, one for each layer
    assert found.ops["_thnn_fused_lstm_cell"] == (2 if kind == "lstm" else 0)


def test_label_looping_launches_less_than_frame_looping_and_reads_once_a_turn():
    plan = planted(8, 62, V=33, width=240)
    batch = plan.model, plan.encoded, plan.lengths
    frame, label = (
        launch_profile(lambda: transducer_greedy(*batch, strategy=strategy))  # noqa: B023
        for strategy in ("frame_looping", "label_looping")
    )
    assert label.launches < 0.8 * frame.launches
    turns = label.syncs - 2  # the lengths, and the most labels
    assert max(map(len, plan.labels)) <= turns < 0.3 * frame.syncs


class Waiting(nn.Module):
    """Our model, with a join that a graph cannot hold."""

    def __init__(self, spoil):
        super().__init__()
        self.inner, self.spoil, self.blank = ours("stateless"), spoil, 9

    def predict(self, labels, state=None):
        return self.inner.predict(labels, state)

    def join(self, encoded, predicted):
        logits = self.inner.join(encoded, predicted)
        return logits + self.spoil(logits)


SPOILERS = {
    "item": lambda logits: logits.sum().item(),
    "nonzero": lambda logits: logits.nonzero().sum(),
    "mask": lambda logits: logits[logits > 0].sum(),
    "if": lambda logits: 1 if (logits > 0).any() else 0,
    "masked write": lambda logits: logits.index_put(
        (logits[..., 0] < torch.inf,), logits.flatten(0, -2)
    ),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_no_capture_begins_with_an_op_that_waits(spoiler):
    turn = turn_of(Waiting(SPOILERS[spoiler]), "cpu")
    with pytest.raises(RuntimeError, match=r"^aten\.\S+ waits for the GPU$"):
        with CaptureGuard():
            turn()


@pytest.mark.gpu
def test_on_a_gpu_a_model_that_waits_is_refused_and_auto_continues(speak, same):
    model = Waiting(SPOILERS["item"]).cuda()
    encoded, lengths = speak("lstm", 4, 16, 3)
    batch = torch.cat([encoded, encoded], 2).float().cuda(), lengths.cuda()
    reason = r"graphs='step': capture failed, RuntimeError: aten\S+ waits for the GPU$"
    with pytest.raises(RuntimeError, match=f"^{reason}"):
        transducer_greedy(model, *batch, graphs="step")
    found = transducer_greedy(model, *batch)
    assert re.match(f"windowed_looping, graphs=off: {reason}", found.impl)
    same(found, transducer_greedy(model, *batch, graphs="off"))
