"""Every module of a block called in place of a kernel, with a row of modulation for each sample, token and run."""

import contextlib
from itertools import combinations

import pytest
import torch
from torch import nn

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer
from turbo_rcm_patch.patching.steps.plan import state_of
from turbo_rcm_patch.tiers import EXACT, QUANTIZED

TOKENS = 18  # of a sample of the tiny Wan model
PARTS = trp.Exact().fuse
SUBSETS = [parts for size in range(len(PARTS)) for parts in combinations(PARTS, size)]
# case: (family, tier, what has its own row of modulation)
CASES = {
    "wan": ("wan", "exact", "sample"),
    "wan, a timestep per token": ("wan", "exact", "token"),
    "wan, runs of tokens": ("wan", "exact", "run"),
    "wan, runs of tokens, quantized": ("wan", "quantized", "run"),
    "skyreels, diffusion forcing": ("skyreels, diffusion forcing", "exact", "token"),
    "anyflow, a timestep per frame": ("anyflow, a timestep per frame", "exact", "run"),
}


class Case:
    """A patched model and an unpatched one, which get the same changes."""

    def __init__(self, case):
        self.name, self.tier, self.rows = CASES[case]
        self.models = [tiny_family_transformer(self.name, layers=1) for _ in range(2)]
        self.inputs = tiny_family_inputs(self.name, self.models[0])
        if self.name == "wan" and self.rows != "sample":
            self.inputs["timestep"] = torch.linspace(0, 999, 2 * TOKENS).reshape(2, TOKENS)
        if self.name == "wan" and self.rows == "run":  # as from an image: the first frame is given
            self.inputs["timestep"] = torch.full((2, TOKENS), 700.0)
            self.inputs["timestep"][:, :6] = 0.0
        self.base = self.output_of(self.models[1])

    @property
    def limit(self):
        return EXACT.limits.fp32 if self.tier == "exact" else QUANTIZED.limits.step

    def output_of(self, model):
        with torch.no_grad():
            return model(**self.inputs)[0]

    def patched(self, **options):
        return trp.patch(self.models[0], {"exact": trp.Exact, "quantized": trp.Quantized}[self.tier](**options))

    def assert_same(self, change):
        """change: a context manager of a block. It must show in the output."""
        outputs = []
        for model in self.models:
            with change(model.blocks[0]):
                outputs.append(self.output_of(model))
        assert relative_error(outputs[0], outputs[1]) <= self.limit
        assert relative_error(outputs[1], self.base) > EXACT.limits.fp32


@pytest.fixture(params=CASES)
def case(request):
    return Case(request.param)


def hooked(path):
    @contextlib.contextmanager
    def change(block):
        hook = block.get_submodule(path).register_forward_hook(lambda module, inputs, output: -output)
        yield
        hook.remove()

    return change


class OtherNorm(nn.Module):
    """A norm of a class that no kernel knows."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x) + 0.5


def with_another_norm(name):
    @contextlib.contextmanager
    def change(block):
        norm = getattr(block, name)
        setattr(block, name, OtherNorm(norm))
        yield
        setattr(block, name, norm)

    return change


def test_a_block_without_some_of_its_kernels_computes_the_same(case):
    """A hook on each module, one after the other, norms of another class, and parts that are not fused."""
    called = [path for path, part in case.models[0].blocks[0].named_modules() if type(part) is not nn.ModuleList]
    with case.patched():
        case.output_of(case.models[0])
        assert state_of(case.models[0].blocks[0]).plans.latest.stream.gate == case.rows
        for path in filter(None, called):
            case.assert_same(hooked(path))
        for name in ("norm1", "norm2", "norm3"):
            case.assert_same(with_another_norm(name))
    for parts in SUBSETS:
        with case.patched(fuse=parts):
            assert relative_error(case.output_of(case.models[0]), case.base) <= case.limit
