"""The choice of a length, padding of arguments, failed captures; on a GPU, equal gradients."""

import copy
import re

import pytest
import torch
from torch import nn

from asrkit.training.graphs import Graphed, graphed_training, pad_to

LENGTHS = [4, 8, 16]


class Net(nn.Module):
    """A batch norm, whose buffers a capture updates, and a layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 2)

    def forward(self, x, lengths):
        valid = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        normal = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.layer(normal) * valid[..., None]


def samples(device="cpu"):
    return [
        (torch.randn(2, length, 3).to(device), torch.full((2,), length).to(device))
        for length in LENGTHS
    ]


def eager(view, arguments):
    """A substitute for a capture: it warms up, as CUDA's does, and replays the module itself."""
    view(*arguments)
    return view


def graphed(net=None, lengths=LENGTHS, capture=eager):
    return Graphed(net or Net(), samples(), lengths, capture)


@pytest.mark.parametrize(
    ("length", "taken"), [(0, 4), (1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)]
)
def test_the_shortest_length_that_fits_is_taken(length, taken):
    out = graphed()(torch.zeros(2, length, 3), torch.ones(2))
    assert out.shape[1] == taken


@pytest.mark.parametrize("before, length, after", [
    ([[1, 1, 1]] * 2, 4, [[1, 1, 1, 0]] * 2),
    ([[[1.0, 1.0]]], 2, [[[1.0, 1.0], [0.0, 0.0]]]),
    ([1.0, 1.0], 9, [1.0, 1.0]),
])  # fmt: skip
def test_padding_appends_zeros_in_dimension_1(before, length, after):
    assert pad_to(torch.tensor(before), length).tolist() == after


def test_arguments_run_at_the_next_length_and_buffers_are_as_before():
    net = Net()
    before = copy.deepcopy(net.state_dict())
    captured = graphed(net)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    x = torch.randn(2, 5, 3)
    lengths = torch.tensor([5, 2])
    out = captured(x, lengths)
    assert out.shape == (2, 8, 2)
    out.sum().backward()
    assert net.layer.weight.grad is not None  # the views share the module's parameters
    net.load_state_dict(before)
    assert torch.equal(out, net(pad_to(x, 8), lengths))


def test_a_failed_capture_leaves_the_module_unchanged_and_names_the_length():
    net = Net()
    before = copy.deepcopy(net.state_dict())
    forward = net.forward

    def fails_at_8(view, arguments):
        view(*arguments)
        view.forward = None
        if arguments[0].shape[1] == 8:
            raise RuntimeError("operation not permitted when stream is capturing")
        return view

    message = (
        "^module: its passes at length 8 cannot be captured: operation not permitted"
    )
    with pytest.raises(RuntimeError, match=message):
        graphed(net, capture=fails_at_8)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert net.forward == forward
    assert net.layer.weight.grad is None


@pytest.mark.parametrize("act, message", [
    (lambda: graphed_training(Net(), samples(), LENGTHS),
     "module: expected one on a CUDA device, got cpu. Elsewhere call it as it is."),
    (lambda: graphed()(torch.zeros(2, 17, 3), torch.ones(2)),
     "arguments: expected at most 16 in dimension 1, got 17."),
    (lambda: graphed()(torch.zeros(3, 4, 3), torch.ones(3)),
     "arguments: expected shapes [(2, 4, 3), (2,)], got [(3, 4, 3), (3,)]. Take batches of the samples' size."),
    (lambda: graphed(lengths=[4, 16, 8]),
     "lengths: expected ascending ones, one for each of 3 samples, got [4, 16, 8]."),
])  # fmt: skip
def test_bad_input_is_one_line(act, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        act()


@pytest.mark.gpu
def test_on_a_gpu_graphs_equal_the_module():
    torch.manual_seed(0)
    net = Net().cuda()
    before = copy.deepcopy(net.state_dict())
    captured = graphed_training(net, samples("cuda"), LENGTHS)
    for length in (3, 8, 13, 4, 16, 1):
        x = torch.randn(2, length, 3, device="cuda")
        x = pad_to(x, min(n for n in LENGTHS if n >= length))
        lengths = torch.tensor([length, 1], device="cuda")
        results = []
        for run in (captured, net):
            net.load_state_dict(before)
            out = run(x, lengths)
            out.square().sum().backward()
            results.append((out.detach().clone(), net.layer.weight.grad.clone()))
            net.zero_grad()
        torch.testing.assert_close(*results)


@pytest.mark.gpu
def test_on_a_gpu_a_read_inside_a_graph_is_named():
    class Reads(Net):
        def forward(self, x, lengths):
            return super().forward(x, lengths) * float(lengths.sum())

    with pytest.raises(
        RuntimeError, match="at length 4 cannot be captured: .* waits for the GPU"
    ):
        graphed_training(Reads().cuda(), samples("cuda"), LENGTHS)
