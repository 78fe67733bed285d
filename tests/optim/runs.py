"""Runs of an optimizer on given gradients: see test_lamb.py and test_novograd.py."""

import torch
from torch import nn


def drawn(shapes, seed, dtype=torch.float32):
    """Random tensors whose values float32 holds."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def trained(kind, shapes, steps_of_gradients, lr, dtype, **settings):
    """The parameters and the optimizer, of class `kind`, after all steps."""
    parameters = [nn.Parameter(weight) for weight in drawn(shapes, 0, dtype)]
    optimizer = kind(parameters, lr, **settings)
    for gradients in steps_of_gradients:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(dtype)
        optimizer.step()
    return parameters, optimizer


def errors(parameters, wanted):
    """Distance of each parameter from what it should be, relative to that; 0 for an empty one."""
    pairs = zip(parameters, wanted, strict=True)
    return [
        float((p.detach().double() - w).norm() / (w.norm() + 1e-300)) for p, w in pairs
    ]
