"""Modules, optimizers and other state, saved and put back bit for bit around trial steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.shapes import expect


@contextmanager
def restored(state: Sequence[Any], device: str) -> Iterator[list[Tensor]]:
    """Put everything back as it was, however the block ends.

    Args:
        state: Modules, optimizers and other objects with a state_dict. Their gradients and torch's
            random numbers are restored as well.
        device: Whose random numbers to restore, beside those of the CPU.

    Yields:
        The parameters in `state`, without gradients.
    """
    restores = [_saved(item) for item in state]
    parameters: list[Tensor] = []
    for item in state:
        if isinstance(item, nn.Module):
            parameters += item.parameters()
    for item in state:
        if isinstance(item, torch.optim.Optimizer):
            parameters += [p for group in item.param_groups for p in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    is_cuda = torch.device(device).type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        try:
            for parameter in parameters:
                parameter.grad = None
            yield parameters
        finally:
            with torch.no_grad():
                for restore in restores:
                    restore()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            # Not after each trial: the allocator frees what it holds before it gives up, and
            # training has fragments as well.
            if is_cuda:
                torch.cuda.empty_cache()


def _saved(item: Any) -> Callable[[], None]:
    """Save a module, an optimizer or another object with a state_dict; a function to restore it."""
    if isinstance(item, nn.Module):
        return _saved_module(item)
    if isinstance(item, torch.optim.Optimizer):
        return _saved_optimizer(item)
    wanted = "modules, optimizers and others with a state_dict"
    expect(hasattr(item, "state_dict"), "state", wanted, type(item).__name__)
    state = _saved_value(item.state_dict())

    def restore() -> None:
        item.load_state_dict(state())

    return restore


def _saved_module(root: nn.Module) -> Callable[[], None]:
    saved = []
    for module in root.modules():
        tensors = dict(module.named_parameters(recurse=False))
        tensors |= dict(module.named_buffers(recurse=False))  # type: ignore[arg-type]
        saved.append((module, module.training, _saved_value(tensors)))

    def restore() -> None:
        for module, training, tensors in saved:
            module.training = training
            for name, tensor in tensors().items():
                setattr(module, name, tensor)

    return restore


def _saved_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    # Not by load_state_dict, which casts moments to the dtype of their weights.
    moments = _saved_value(dict(optimizer.state))
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append((group, _saved_value(settings)))

    def restore() -> None:
        optimizer.state.clear()
        optimizer.state.update(moments())
        for group, settings in groups:
            group.update(settings())

    return restore


def _saved_value(value: Any) -> Callable[[], Any]:
    """A function that returns `value` as it is now.

    The tensors are the same objects, with their present contents, which wait in host memory.
    """
    if isinstance(value, Tensor):
        content = value.detach().to("cpu", copy=True)
        return lambda: value.copy_(content)
    if isinstance(value, dict):
        parts = {key: _saved_value(part) for key, part in value.items()}
        return lambda: {key: part() for key, part in parts.items()}
    if isinstance(value, list | tuple):
        items = [_saved_value(item) for item in value]
        return lambda: type(value)(item() for item in items)
    return lambda: value
