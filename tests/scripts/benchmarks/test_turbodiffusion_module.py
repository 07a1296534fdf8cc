"""TurboDiffusion's module as a rival; a package that computes dense attention stands for its own."""

import importlib.util
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from scripts.benchmarks.contests import sparse
from scripts.benchmarks.rivals import turbodiffusion_module
from scripts.benchmarks.rivals.turbodiffusion_module import COMPILED, SHIPPED
from turbo_rcm_patch.bench.ops import WithoutGraph, measure_errors


class Stand(torch.nn.Module):
    def __init__(self, head_dim, topk, **blocks):
        super().__init__()
        self.proj_l, self.topk, self.blocks = torch.nn.Linear(head_dim, head_dim), topk, blocks

    def forward(self, q, k, v):
        attended = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        return attended + self.proj_l(attended.float()).to(q.dtype)


class Broken(Stand):
    def forward(self, q, k, v):
        raise RuntimeError("no extension")


@pytest.fixture
def installed(monkeypatch):
    """Installs a package with these classes in bf16 and in 8 bits."""
    monkeypatch.setattr(torch, "compile", lambda module: module)

    def install(in_bf16=Stand, in_8_bits=Stand):
        package = types.ModuleType("SLA")
        package.SparseLinearAttention, package.SageSparseLinearAttention = in_bf16, in_8_bits
        package.__spec__ = types.SimpleNamespace(name="SLA")
        monkeypatch.setitem(sys.modules, "SLA", package)

    return install


def contest(name):
    return getattr(sparse, name)(2, 300, 64, torch.device("cpu"), lambda function: function)


@pytest.mark.parametrize("name", ["norms_sparse_linear_attention", "sparse_linear_attention_bf16"])
def test_it_is_timed_where_it_is_installed(name, installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "SLA", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not {SHIPPED, COMPILED} & contest(name).partial.keys()
    monkeypatch.undo()
    monkeypatch.setattr(torch, "compile", lambda module: module)  # what it makes is not the point, and takes seconds
    installed()
    published = contest(name)
    assert {SHIPPED, COMPILED} <= published.partial.keys()
    assert published.partial[SHIPPED]().shape == (1, 300, 2, 64)
    assert all(isinstance(published.partial[name], WithoutGraph) for name in (SHIPPED, COMPILED))
    assert not {SHIPPED, COMPILED} & measure_errors(published).keys()  # which would say nothing


def test_it_has_the_projection_the_share_and_the_blocks(installed):
    installed()
    weight, bias = torch.randn(64, 64), torch.randn(64)
    for blocks, expected in ((None, {}), ((128, 64), {"BLKQ": 128, "BLKK": 64})):
        built = turbodiffusion_module._build(weight, bias, 0.25, blocks)
        assert torch.equal(built.proj_l.weight, weight)
        assert torch.equal(built.proj_l.bias, bias)
        assert (built.topk, built.blocks) == (0.25, expected)


def test_where_it_does_not_run_that_is_said(installed, capsys):
    installed(in_8_bits=Broken)
    assert SHIPPED not in contest("norms_sparse_linear_attention").partial
    assert f"{SHIPPED} does not run here: RuntimeError: no extension" in capsys.readouterr().out
    assert SHIPPED in contest("sparse_linear_attention_bf16").partial


def test_without_a_compiler_what_ships_is_timed(installed, monkeypatch, capsys):
    installed()
    monkeypatch.setattr(torch, "compile", lambda module: Broken(64, 0.1))
    partial = contest("norms_sparse_linear_attention").partial
    assert SHIPPED in partial
    assert COMPILED not in partial
    assert f"{COMPILED} does not run here" in capsys.readouterr().out
