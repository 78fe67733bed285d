"""One of four processes that check sharded and distributed LAMB.

`test_sharded.py` starts them. Each check puts a number, or the text of an error, under its name.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from asrkit.optim import Average, Lamb, NovoGrad, ShardedLamb

RANKS = 4
STEPS = 20
SHAPES = [
    (40, 9),
    (1,),
    (7,),
    (33, 5),
    (),
    (3,),
]  # the first is longer than a shard and than buckets
SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 1e-2}
RATE = 4e-3


def weights():
    """The parameters, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step, rank):
    """Those of a rank in a step; None where it has none. The last parameter has none on any rank in odd steps."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    size = (0.01, 0.1, 3.0)[step % 3]  # clipped or not; a mean, no sum: eps is not scaled
    drawn = [size * torch.randn(shape, generator=generator) for shape in SHAPES]
    if rank == 1:
        drawn[2] = None
    if step % 2:
        drawn[5] = None
    return drawn


def one_process(ranks, steps):
    """Parameters and plain LAMB after all steps, with the mean gradient of all ranks."""
    parameters = weights()
    optimizer = Lamb(parameters, RATE, impl="reference", **SETTINGS)
    for step in steps:
        of_ranks = [gradients(step, rank) for rank in ranks]
        for index, parameter in enumerate(parameters):
            present = [drawn[index] for drawn in of_ranks if drawn[index] is not None]
            parameter.grad = None
            if present:
                parameter.grad = sum(present) / len(ranks)
        optimizer.step()
    return parameters, optimizer


def walk(parameters, optimizer, rank, steps):
    """Take the steps with this rank's gradients."""
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step, rank), strict=True):
            parameter.grad = gradient
        optimizer.step()


def distance(parameters, wanted):
    """Largest difference of any parameter, relative to its largest value."""
    pairs = zip(parameters, wanted, strict=True)
    return max(float(((p - w).abs().max() / w.abs().max()).detach()) for p, w in pairs)


def state_distance(state, wanted):
    """The same of two states of plain LAMB."""
    assert state["param_groups"] == wanted["param_groups"]
    assert state["state"].keys() == wanted["state"].keys()
    most = 0.0
    for index, values in wanted["state"].items():
        assert state["state"][index]["step"] == values["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            off = (state["state"][index][name] - values[name]).abs().max()
            most = max(most, float(off / values[name].abs().max()))
    return most


def check_shards(rank, pair, peers):
    """Four ranks, two by two, and two: weights, state, and a restart with other ranks."""
    found = {}
    steps = range(STEPS)
    everyone = range(RANKS)
    wanted, plain = one_process(everyone, steps)
    for name, groups in {"four": {}, "two_by_two": {"group": pair, "across": peers}}.items():
        parameters = weights()
        optimizer = ShardedLamb(parameters, RATE, bucket=100, impl="foreach", **groups, **SETTINGS)
        walk(parameters, optimizer, rank, steps)
        found[name] = distance(parameters, wanted)
        found[f"{name}_state"] = state_distance(optimizer.state_dict(), plain.state_dict())
        found[f"{name}_held"] = optimizer.exp_avg.numel()
    partners = [rank // 2 * 2, rank // 2 * 2 + 1]
    wanted, _ = one_process(partners, steps)
    parameters = weights()
    optimizer = ShardedLamb(parameters, RATE, group=pair, bucket=100, **SETTINGS)
    walk(parameters, optimizer, rank, steps)
    found["two"] = distance(parameters, wanted)
    return found


def check_restart(rank, pair, peers):
    """Ten steps two by two; the state then goes on on four ranks, and in one process."""
    parameters = weights()
    first = ShardedLamb(parameters, RATE, group=pair, across=peers, bucket=64, **SETTINGS)
    walk(parameters, first, rank, range(10))
    state = first.state_dict()
    alone = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    second = ShardedLamb(parameters, 9.0, betas=(0.1, 0.1), weight_decay=9.0, bucket=1000)
    second.load_state_dict(state)
    walk(parameters, second, rank, range(10, STEPS))
    wanted, plain = one_process(range(RANKS), range(STEPS))
    resumed = Lamb(alone, 9.0, betas=(0.1, 0.1), weight_decay=9.0)
    resumed.load_state_dict(state)
    for step in range(10, STEPS):
        of_ranks = [gradients(step, each) for each in range(RANKS)]
        for index, parameter in enumerate(alone):
            present = [drawn[index] for drawn in of_ranks if drawn[index] is not None]
            parameter.grad = None
            if present:
                parameter.grad = sum(present) / RANKS
        resumed.step()
    return {
        "restarted_on_four": distance(parameters, wanted),
        "restarted_in_one": distance(alone, wanted),
        "restarted_state": state_distance(second.state_dict(), plain.state_dict()),
    }


def check_errors(rank, pair, peers):
    """What a gradient that is not finite on one rank does, and what is said of ranks that differ."""
    parameters = weights()
    optimizer = ShardedLamb(parameters, RATE, bucket=100, **SETTINGS)
    walk(parameters, optimizer, rank, range(2))
    before = [parameter.detach().clone() for parameter in parameters]
    state = optimizer.state_dict()
    for parameter, gradient in zip(parameters, gradients(2, 0), strict=True):
        parameter.grad = gradient
    if rank == 3:
        parameters[0].grad[0, 0] = torch.nan
    optimizer.step()
    found = {
        "skipped": distance(parameters, before) + state_distance(optimizer.state_dict(), state)
    }
    twins = [("first", nn.Parameter(torch.ones(3))), ("second", nn.Parameter(torch.zeros(3)))]
    if rank == 2:
        twins.reverse()
    try:
        ShardedLamb(twins, RATE, **SETTINGS)
    except ValueError as error:
        found["order"] = str(error)
    return found


def layers():
    """A model whose tensors four ranks cannot share evenly, the last bias least of all."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 1))


def examples(step, rank):
    """Inputs and targets of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)


def step_both(step, rank, ranks, sharded, whole):
    """A step of a sharded model on this rank's examples, and of the whole one on those of all its ranks."""
    data = [examples(step, each) for each in ranks]
    everything = [torch.cat(parts) for parts in zip(*data, strict=True)]
    pairs = [(sharded, examples(step, rank)), (whole, everything)]
    for (model, optimizer), (x, y) in pairs:
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_novograd(rank, mesh):
    """NovoGrad on the DTensors of FSDP2: its norms are those of whole parameters."""
    from torch.distributed.fsdp import fully_shard

    found = {}
    for name, part, ranks in (
        ("novograd_two", mesh["shard"], [rank // 2 * 2, rank // 2 * 2 + 1]),
        ("novograd_two_by_two", mesh, range(RANKS)),
    ):
        model = layers()
        whole = layers()
        for one in (model, whole):  # a weight that no rank has a gradient of must not decay
            one.register_parameter("idle", nn.Parameter(torch.ones(5)))
        fully_shard(model, mesh=part)
        optimizer = NovoGrad(model.parameters(), RATE, betas=(0.95, 0.5))
        plain = NovoGrad(whole.parameters(), RATE, betas=(0.95, 0.5), impl="reference")
        for step in range(STEPS):
            step_both(step, rank, ranks, (model, optimizer), (whole, plain))
        gathered = [parameter.full_tensor() for parameter in model.parameters()]
        found[name] = distance(gathered, list(whole.parameters()))
        before = [parameter.clone() for parameter in gathered]
        x, y = examples(STEPS, rank)
        (model(x) * y * torch.nan).sum().backward()
        optimizer.step()
        gathered = [parameter.full_tensor() for parameter in model.parameters()]
        found[f"{name}_skipped"] = distance(gathered, before)
    return found


def check_fsdp(rank, mesh):
    """Plain LAMB and averages on the DTensors of FSDP2, in groups of two that hold the same."""
    from torch.distributed.fsdp import fully_shard

    found = {}
    for name, part, ranks in (
        ("fsdp_two", mesh["shard"], [rank // 2 * 2, rank // 2 * 2 + 1]),
        ("fsdp_two_by_two", mesh, range(RANKS)),
    ):
        model = layers()
        whole = layers()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=part)
        # the last bias has one element: an empty part on every other rank
        optimizer = Lamb(model.parameters(), RATE, **SETTINGS)
        plain = Lamb(whole.parameters(), RATE, impl="reference", **SETTINGS)
        averages = [Average(model, 0.9), Average(whole, 0.9)]
        for step in range(STEPS):
            step_both(step, rank, ranks, (model, optimizer), (whole, plain))
            for average in averages:
                average.update()
        gathered = [parameter.full_tensor() for parameter in model.parameters()]
        found[name] = distance(gathered, list(whole.parameters()))
        found[f"{name}_impl"] = optimizer.impl
        with averages[0].swapped(), averages[1].swapped():
            gathered = [parameter.full_tensor() for parameter in model.parameters()]
            found[f"{name}_average"] = distance(gathered, list(whole.parameters()))
    mixed = [*model.parameters(), nn.Parameter(torch.ones(2))]
    try:
        Lamb(mixed, RATE, **SETTINGS)
    except ValueError as error:
        found["mixed"] = str(error)
    try:
        ShardedLamb(model.parameters(), RATE, **SETTINGS)
    except ValueError as error:
        found["dtensors"] = str(error)
    try:
        ShardedLamb(layers().parameters(), RATE, **SETTINGS).load_state_dict(optimizer.state_dict())
    except ValueError as error:
        found["parts"] = str(error)
    return found


def work(rank, folder):
    """Join the others, run all checks, and write what was found to the folder."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pair = mesh.get_group("shard")
    peers = mesh.get_group("replicate")
    found = {}
    for check in (check_shards, check_restart, check_errors):
        found |= check(rank, pair, peers)
    found |= check_fsdp(rank, mesh)
    found |= check_novograd(rank, mesh)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
