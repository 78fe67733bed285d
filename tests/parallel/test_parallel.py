"""What is split in time over 2 and 4 processes equals the whole, forward and backward."""

import os
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from asrkit.parallel import BatchNorm, conv1d_split, halo, time_wavefront

sys.path.insert(0, str(Path(__file__).parent))
import processes

T = 48  # frames of the whole
# taps, dilation, stride, groups, overlap
CONVOLUTIONS = [
    (1, 1, 1, 1, True),
    (5, 1, 1, 1, True),
    (5, 3, 1, 1, True),
    (7, 4, 1, 1, True),  # the halo is as long as a part of four
    (5, 1, 2, 1, True),
    (7, 2, 4, 1, True),
    (1, 1, 3, 1, True),
    (5, 2, 1, 3, True),
    (5, 2, 2, 1, False),
]


def draw(*shape, seed):
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_()


def part(whole, place):
    """This rank's frames of the whole."""
    rank, ranks = place
    return whole.detach().chunk(ranks, -1)[rank].clone()


def expect_same(whole, split, place, shared, group, x_whole, x_part):
    """Outputs, input gradients and the summed gradients of the `shared` tensors are the whole's."""
    close = {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(split, part(whole, place), **close)
    weights = draw(*whole.shape, seed=9).detach()
    wanted = torch.autograd.grad((whole * weights).sum(), [x_whole, *shared])
    got = torch.autograd.grad((split * part(weights, place)).sum(), [x_part, *shared])
    torch.testing.assert_close(got[0], part(wanted[0], place), **close)
    for mine, all_of_it in zip(got[1:], wanted[1:], strict=True):
        dist.all_reduce(mine, group=group)
        torch.testing.assert_close(mine, all_of_it, **close)


def check_convolutions(place, group):
    for taps, dilation, stride, groups, overlap in CONVOLUTIONS:
        x = draw(2, 3, T, seed=1)
        weight = draw(6, 3 // groups, taps, seed=2)
        bias = draw(6, seed=3)
        reach = dilation * (taps // 2)
        whole = F.conv1d(x, weight, bias, stride, reach, dilation, groups)
        mine = part(x, place).requires_grad_()
        options = {"dilation": dilation, "stride": stride, "overlap": overlap}
        split = conv1d_split(mine, weight, bias, group=group, **options)
        expect_same(whole, split, place, [weight, bias], group, x, mine)


def check_stack(place, group):
    """Convolution, batch norm and ReLU, twice."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(2)])
    split = nn.ModuleList(BatchNorm(3, group=group).double() for _ in range(2))
    weights = [draw(3, 3, 5, seed=seed) for seed in (4, 5)]
    x = draw(2, 3, T, seed=1)
    mine = part(x, place).requires_grad_()
    outputs = []
    for frames, norms in ((x, plain), (mine, split)):
        for weight, norm in zip(weights, norms, strict=True):
            if norms is plain:
                frames = F.conv1d(frames, weight, padding=2)
            else:
                frames = conv1d_split(frames, weight, group=group)
            frames = norm(frames).relu()
        outputs.append(frames)
    expect_same(*outputs, place, weights, group, x, mine)
    torch.testing.assert_close(split.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    norm = BatchNorm(3, group=group)
    with torch.autocast("cpu", torch.bfloat16):
        half = norm(mine.detach().bfloat16())
    assert half.dtype == torch.bfloat16
    whole_norm = nn.BatchNorm1d(3)
    whole_norm(x.detach().bfloat16().float())
    torch.testing.assert_close(norm.running_mean, whole_norm.running_mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norm.running_var, whole_norm.running_var, rtol=1e-4, atol=1e-6)
    plain.eval()
    split.eval()
    torch.testing.assert_close(split[0](mine), part(plain[0](x), place), rtol=1e-12, atol=1e-12)


def check_lstms(place, group):
    for layers, batch_first in ((1, True), (3, True), (3, False)):
        torch.manual_seed(layers)
        lstm = nn.LSTM(3, 4, layers, batch_first=batch_first).double()
        x = draw(2, 3, T, seed=6)
        mine = part(x, place).requires_grad_()
        order = (0, 2, 1) if batch_first else (2, 0, 1)
        back = torch.argsort(torch.tensor(order)).tolist()
        whole = lstm(x.permute(order))[0].permute(back)
        split = time_wavefront(lstm, mine.permute(order), group).permute(back)
        expect_same(whole, split, place, [*lstm.parameters()], group, x, mine)
        with torch.no_grad():
            again = time_wavefront(lstm, mine.permute(order), group).permute(back)
        assert torch.equal(again, split)
        lstm.requires_grad_(False)  # frozen, and the gradient of the frames is wanted
        frozen = time_wavefront(lstm, mine.permute(order), group).permute(back)
        (wanted,) = torch.autograd.grad(lstm(x.permute(order))[0].square().sum(), x)
        (got,) = torch.autograd.grad(frozen.square().sum(), mine)
        torch.testing.assert_close(got, part(wanted, place), rtol=1e-11, atol=1e-12)


def check_halo(place, group):
    rank, ranks = place
    frames = torch.arange(ranks * 3.0)
    wide = halo(frames[3 * rank : 3 * rank + 3], 2, 1, group)
    assert wide.tolist() == F.pad(frames, (2, 1))[3 * rank : 3 * rank + 6].tolist()


def check_refusals(place, group):
    """All ranks refuse, before anything is sent."""
    x = torch.zeros(1, 2, 6)
    refusals = {
        "x: expected a part as long as its halo, 7 frames, got 6. Split over fewer ranks.": [
            lambda: halo(x, 7, 0, group),
            lambda: conv1d_split(x, torch.zeros(1, 2, 15), group=group),
        ],
        "x: expected frames in multiples of stride=4, got 6. Pad the whole before it is split.": [
            lambda: conv1d_split(x, torch.zeros(1, 2, 3), stride=4, group=group)
        ],
        "weight: expected an odd number of taps, got 4.": [
            lambda: conv1d_split(x, torch.zeros(1, 2, 4), group=group)
        ],
        "left: expected a number of frames, at least 0, got -1.": [lambda: halo(x, -1, 0, group)],
        "lstm: expected one direction and no projection, got LSTM(2, 3, bidirectional=True).": [
            lambda: time_wavefront(nn.LSTM(2, 3, bidirectional=True), x, group)
        ],
    }
    for message, calls in refusals.items():
        for call in calls:
            with pytest.raises(ValueError) as caught:
                call()
            assert str(caught.value) == message


def work(rank, store, report):
    """Everything, on all four ranks and on pairs of them; the report says what went wrong."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([number]) for number in range(4)][rank]
    problem = ""
    try:
        for group in (None, pairs[rank // 2]):
            place = (dist.get_rank(group), dist.get_world_size(group))
            for check in (check_halo, check_convolutions, check_stack, check_lstms, check_refusals):
                check(place, group)
        with pytest.raises(ValueError, match=r"^group: expected a group of 2 ranks or more, got 1"):
            conv1d_split(torch.zeros(1, 1, 4), torch.zeros(1, 1, 3), group=alone)
        with pytest.raises(ValueError, match="that has this process, got one without it"):
            halo(torch.zeros(4), 1, 1, pairs[1 - rank // 2])
    except BaseException:
        problem = traceback.format_exc()
    report.put((rank, problem))
    if not problem:
        dist.barrier()
    dist.destroy_process_group()


def test_split_in_time_over_two_and_four_processes_equals_the_whole(tmp_path, start_method):
    processes.run(work, 4, str(tmp_path / "store"), start_method)


def test_without_a_group_the_plain_function_is_named():
    with pytest.raises(ValueError) as caught:
        halo(torch.zeros(4), 1, 1)
    assert str(caught.value) == (
        "group: expected a group of 2 ranks or more, got none: torch.distributed is not "
        "initialised. With one process call torch.nn.functional.pad."
    )
