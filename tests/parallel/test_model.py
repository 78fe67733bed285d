"""A whole Jasper, its frames split in time over two processes, equals the Jasper of the whole."""

import copy
import os
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asrkit.models import Jasper, JasperConfig, Stage
from asrkit.parallel import split_in_time

sys.path.insert(0, str(Path(__file__).parent))
import processes

FRAMES = 96
LENGTHS = torch.tensor([95, 71])
STAGES = (
    Stage(channels=6, kernel=11, repeat=1, dropout=0, stride=2, dense=False),
    Stage(channels=6, kernel=11, repeat=3, dropout=0),
    Stage(channels=8, kernel=13, repeat=2, dropout=0),
    Stage(channels=5, kernel=9, repeat=1, dropout=0, dilation=2, dense=False),
    Stage(channels=7, kernel=1, repeat=1, dropout=0, dense=False),
)
CONFIG = JasperConfig(bins=4, stages=STAGES)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def encoder():
    """In float64, no parameter or statistic of a norm at its first value."""
    torch.manual_seed(0)
    model = Jasper(CONFIG).double()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.2, 3)
            nn.init.normal_(part.weight)
            nn.init.normal_(part.bias)
    return model


def check(rank, training):
    """Frames, lengths, gradients of features and weights, and running statistics are the whole's."""
    plain = encoder().train(training)
    split = split_in_time(copy.deepcopy(plain))
    features = torch.randn(2, FRAMES, CONFIG.bins, dtype=torch.float64)
    features[1, LENGTHS[1] :] = torch.nan  # in the padding
    offset = rank * FRAMES // 2
    mine = features[:, offset : offset + FRAMES // 2].clone().requires_grad_()
    features.requires_grad_()
    wanted, wanted_lengths = plain(features, LENGTHS)
    got, lengths = split(mine, (LENGTHS - offset).clamp(max=FRAMES // 2))
    half = FRAMES // 4
    torch.testing.assert_close(got, wanted[:, rank * half : (rank + 1) * half], **CLOSE)
    assert torch.equal(lengths, (wanted_lengths - rank * half).clamp(max=half))

    weights = torch.randn(wanted.shape, dtype=torch.float64)
    (wanted * weights).sum().backward()
    (got * weights[:, rank * half : (rank + 1) * half]).sum().backward()
    torch.testing.assert_close(mine.grad, features.grad[:, offset : offset + FRAMES // 2], **CLOSE)
    named = dict(split.named_parameters())
    assert named.keys() == dict(plain.named_parameters()).keys()
    for name, weight in plain.named_parameters():
        dist.all_reduce(named[name].grad)
        torch.testing.assert_close(named[name].grad, weight.grad, **CLOSE)
    torch.testing.assert_close(split.state_dict(), plain.state_dict(), **CLOSE)


def check_refusals():
    """A model is refused before any of it is changed."""
    conv = nn.Conv1d(2, 2, 3, padding=1)
    refused = {
        "convolutions over time, batch norms and layers of single frames, got 1: LSTM": nn.LSTM(
            2, 3
        ),
        "odd kernels padded by zeros on both sides, got 1: Conv1d": nn.Conv1d(2, 2, 3),
        "norms with parameters, running statistics .* got 1: Batch": nn.BatchNorm1d(
            2, affine=False
        ),
    }
    for message, layer in refused.items():
        model = nn.Sequential(conv, layer)
        with pytest.raises(ValueError, match=f"^model: expected {message}"):
            split_in_time(model)
        assert model[0] is conv


def work(rank, store, report):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    problem = ""
    try:
        check(rank, training=False)
        check(rank, training=True)
        check_refusals()
    except BaseException:
        problem = traceback.format_exc()
    report.put((rank, problem))
    if not problem:
        dist.barrier()
    dist.destroy_process_group()


def test_a_jasper_split_in_time_over_two_processes_equals_the_whole(tmp_path, start_method):
    assert CONFIG.receptive_field > FRAMES  # a halo for all layers at once would be the whole
    processes.run(work, 2, str(tmp_path / "store"), start_method)


def test_without_a_group_the_model_stays_as_it_is():
    with pytest.raises(ValueError, match=r"With one process call the model as it is\.$"):
        split_in_time(nn.Sequential(nn.Conv1d(1, 1, 3, padding=1)))
