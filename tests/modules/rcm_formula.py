"""The rCM attention block written out, and checks of a module against it."""

import copy

import torch
from torch.nn import functional as F

from tests.oracle import relative_error


def formula(module, x, timestep, residual):
    """The block written out, in the dtype of its arguments; timestep [B]."""
    q, k, v = (
        part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for part in F.linear(x, module.qkv.weight, module.qkv.bias).split(module.dim, -1)
    )
    attended = ((q @ k.mT) * (module.dim // module.num_heads) ** -0.5).softmax(-1) @ v
    output = F.linear(attended.transpose(1, 2).flatten(2), module.proj.weight, module.proj.bias)
    t = timestep.view(-1, 1, 1)
    return residual / (t * t + 1) + t / (t * t + 1).sqrt() * output


def oracle(module, x, timestep, residual):
    with torch.no_grad():
        return formula(copy.deepcopy(module).double(), x.double(), timestep.double(), residual.double())


def inputs(batch=2, tokens=7, dim=48, dtype=torch.float32, device="cpu"):
    x, residual = torch.randn(2, batch, tokens, dim)
    return x.to(device, dtype), residual.to(device, dtype)


def check_gradients(module, device):
    """Check the gradients in fp32 on the device against the formula's in fp64."""

    def gradients(function, dtype):
        wide = copy.deepcopy(module).to(device, dtype)
        leaves = [leaf.detach().to(device, dtype).requires_grad_() for leaf in (x, torch.tensor([0.3, 2.0]), residual)]
        function(wide, *leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves] + [parameter.grad for parameter in wide.parameters()]

    x, residual = inputs(dim=module.dim)
    actual = gradients(lambda m, *leaves: m(*leaves), torch.float32)
    for gradient, expected in zip(actual, gradients(formula, torch.float64), strict=True):
        assert relative_error(gradient, expected) <= 1e-5


KINDS_OF_TIMESTEPS = (torch.tensor([0.3, 2.0]), torch.tensor(0.5), 0.75)


def check_compiled(module, device, timesteps=KINDS_OF_TIMESTEPS):
    """Check the compiled module, one graph, with timesteps of every kind."""
    torch.compiler.reset()
    module = module.to(device)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    x, residual = inputs(dim=module.dim, device=device)
    for timestep in timesteps:
        assert relative_error(compiled(x, timestep, residual), module(x, timestep, residual)) <= 1e-6
