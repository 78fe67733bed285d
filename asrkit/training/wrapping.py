"""DDP and FSDP2 around a model, and one state by names, whichever of them wraps it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from asrkit.models.assembly import Model
from asrkit.training.batches import Prepared
from asrkit.training.config import TrainConfig
from asrkit.training.objective import TrainingLoss, objective_of, training_loss
from asrkit.training.processes import Processes


class BatchLoss(nn.Module):
    """The loss of a batch as a module.

    DDP and FSDP2 act on the forward pass of what they wrap. All use of the weights lies in this
    one, also where a loss reads them directly.

    Args:
        model: The model that is trained.
        config: How it is trained.
    """

    def __init__(self, model: Model, config: TrainConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, take: Callable[[], Prepared]) -> TrainingLoss:
        """`training_loss` of a batch.

        Args:
            take: Returns the batch. FSDP2 would move the batch itself to the device, its lengths
                too, which are to stay on the host.
        """
        return training_loss(self.model, take(), self.config)


def wrap(loss: BatchLoss, processes: Processes) -> nn.Module:
    """`loss`, wrapped so that gradients are averaged over processes; alone, `loss` itself.

    DDP keeps all weights on each process. FSDP2 (`config.shard`) keeps a part of them, and gathers
    them block by block.

    Args:
        loss: Of a model whose optimizer is made after this: FSDP2 replaces the parameters.
        processes: Of this run.
    """
    if loss.config.shard:
        shard(loss, processes)
        return loss
    if not processes.grouped:
        return loss
    # DDP would wait for their gradients
    idle_weights = objective_of(loss.model.config).has_idle_weights(loss.model, loss.config)
    return DistributedDataParallel(
        loss, broadcast_buffers=False, find_unused_parameters=idle_weights
    )


def shard(loss: BatchLoss, processes: Processes) -> None:
    """Shard the weights in place, by FSDP2's `fully_shard`, each block of the encoder by itself.

    Args:
        loss: Of the model.
        processes: Of this run, in a process group.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(loss.parameters()).device
    mesh = init_device_mesh(device.type, (processes.count,))
    for block in encoder_blocks(loss.model.encoder):
        fully_shard(block, mesh=mesh)
    fully_shard(loss, mesh=mesh)


def encoder_blocks(encoder: nn.Module) -> list[nn.Module]:
    """The blocks of an encoder, first to last; none where it does not list them."""
    for name in ("blocks", "stages"):
        blocks = getattr(encoder, name, None)
        if isinstance(blocks, nn.ModuleList):
            return list(blocks)
    return []


@contextmanager
def accumulating(loss: nn.Module) -> Iterator[None]:
    """A block whose backward pass adds to the gradients of this process, without averaging them.

    Args:
        loss: What `wrap` returned.
    """
    if isinstance(loss, DistributedDataParallel):
        with loss.no_sync():
            yield
        return
    set_sync = getattr(loss, "set_requires_gradient_sync", None)  # FSDP2 has it
    if set_sync is None:
        yield
        return
    set_sync(False)
    yield
    set_sync(True)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the host; of a sharded one, every process has to ask.

    Args:
        tensor: Plain, or sharded by FSDP2.
    """
    gather = getattr(tensor, "full_tensor", None)
    if gather is not None:
        tensor = gather()
    return tensor.detach().cpu()


def laid_out_as(value: Tensor, example: Tensor) -> Tensor:
    """`value` sharded as `example` is, without communication; a copy if `example` is plain.

    Args:
        value: All of the tensor, the same on every process.
        example: Plain, or sharded by FSDP2.
    """
    if not hasattr(example, "device_mesh"):
        return value.clone()  # it may lie in a file
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(example, DTensor)
    value = value.to(example.device)
    return distribute_tensor(value, example.device_mesh, example.placements, src_data_rank=None)


def whole_by_name(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each of the tensors whole and on the host.

    Args:
        values: By name, as `state_dict` of a model.
    """
    return {name: whole(value) for name, value in values.items()}


def laid_out_like(
    examples: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Each of the values sharded as the example of its name is.

    Args:
        examples: Plain, or sharded by FSDP2.
        values: What `whole_by_name` returned, of these names at least.
    """
    return {name: laid_out_as(values[name], example) for name, example in examples.items()}


def load_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take weights and buffers, however they are sharded here.

    Args:
        model: Changed in place.
        state: What `whole_by_name` returned of its `state_dict`.
    """
    model.load_state_dict(laid_out_like(model.state_dict(), state))


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """State of an optimizer by names of the parameters, whole and on the host.

    Args:
        optimizer: Over the parameters of `model`.
        model: Names them.
    """
    names = _names_in_order(optimizer, model)
    saved = optimizer.state_dict()
    state = {}
    for number in sorted(saved["state"]):
        values = saved["state"][number]
        state[names[number]] = {key: _whole_or_same(value) for key, value in values.items()}
    groups = []
    for group in saved["param_groups"]:
        settings = {key: _whole_or_same(value) for key, value in group.items()}
        groups.append(settings | {"params": [names[number] for number in group["params"]]})
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Any]
) -> None:
    """Take an optimizer's state from what `optimizer_state` returned, however it is sharded here.

    Args:
        optimizer: Over the parameters of `model`; changed in place.
        model: Names them.
        saved: The state; by numbers of parameters in place of names, as asrkit 0.2 saved it, too.
    """
    names = _names_in_order(optimizer, model)
    parameters = dict(model.named_parameters())
    numbers: dict[str | int, int] = {name: number for number, name in enumerate(names)}
    numbers |= {number: number for number in range(len(names))}
    state = {}
    for key, values in saved["state"].items():
        number = numbers[key]
        parameter = parameters[names[number]]
        laid_out = {}
        for name, value in values.items():
            laid_out[name] = value
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                laid_out[name] = laid_out_as(value, parameter)
        state[number] = laid_out
    groups = []
    for group in saved["param_groups"]:
        groups.append(group | {"params": [numbers[key] for key in group["params"]]})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _names_in_order(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Names of the parameters in the order in which the optimizer numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _whole_or_same(value: Any) -> Any:
    if isinstance(value, Tensor):
        return whole(value)
    return value
