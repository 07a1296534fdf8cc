"""Watching what plans launch."""

from dataclasses import replace

from turbo_rcm_patch import kernels


def around_launches(monkeypatch, name, around, module=kernels):
    """Let plans from now on launch the kernels of an op by around(launch). module: where plans look the op up."""
    op = getattr(module, name)
    watched = tuple(replace(kernel, launch=around(kernel.launch)) for kernel in op.kernels)
    monkeypatch.setattr(module, name, replace(op, kernels=watched))
