"""Every change of the table in change_table.py takes effect on a patched model, and `restore` leaves it.

Each is made in the exact tier, and in one more column of its row: these alternate from row to row. If that is the
column of graphs, it is the only one: the exact tier runs without a graph before it records one. A row that names
families is made in these in the exact tier, and on Wan in another one.

The oracle is a model without the patch, but with the tier's arithmetic. diffusers' own forwards run on it. For the
quantized tier it has the 8-bit weights, dequantised. For the sparse tier it has the attention processors. The
block-sparse tier keeps all keys here.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching import tape as tapes
from tests.patching.change_table import CHANGES, MOST, Change
from tests.patching.changes import ANYTHING, GRAPHS, SEEN, WRITES
from tests.patching.pairs import attributes_of, in_one_tensor
from tests.tiny_families import EACH_MODEL, first_of, tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import tiny_transformer_inputs
from turbo_rcm_patch.patching.families import family_of
from turbo_rcm_patch.patching.journal import Journal
from turbo_rcm_patch.patching.steps.sparse_linear import use_processors
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.tiers import EXACT, QUANTIZED

RULE = r"call restore\(\) first, change the weight, then patch again"
CONFIGS = {
    "exact": trp.Exact(),
    GRAPHS: tapes.AUTO,
    "quantized": trp.Quantized(),
    "sparse": trp.Sparse(quantize=(), topk=0.7, blocks=(5, 4)),
    "block_sparse": trp.BlockSparse(quantize=(), mass=1.0, min_tokens=0, blocks=(4, 4)),
}


MOSTLY = (MOST, (*MOST, GRAPHS))


def columns_of(change, index):
    """Return the columns of a row that are tested on Wan."""
    others = change.held or [column for column in change.columns if column != "exact"]
    other = others[index % len(others)] if others else None
    if other == GRAPHS or (other and change.families):
        return [other]
    return [*(column for column in change.columns if column == "exact"), *([other] if other else [])]


CELLS = [
    *((name, column, "wan") for i, (name, row) in enumerate(CHANGES.items()) for column in columns_of(row, i)),
    *((name, "exact", family) for name, change in CHANGES.items() for family in change.families),
]
# A change that has nothing to do with self-attention is here only if it can be made before a patch too.
UNDER = [
    *((name, "sparse") for name, change in CHANGES.items() if "sparse" in change.columns),
    *((name, "quantized") for name, change in CHANGES.items() if change.columns[:3] in MOSTLY and change.before),
]


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    """set_attention_backend changes a global default, and compiled blocks need not be traced here."""
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)
    with torch.compiler.set_stance("force_eager"):
        yield
    SEEN.clear()


def build(tier, family, options):
    """Return the model, with weights that bf16 holds exactly."""
    model = tiny_family_transformer(family, **{"layers": 2, **dict(options)})
    if tier == "sparse":
        for block in model.blocks:
            torch.manual_seed(3)
            block.attn1.proj_l = nn.Linear(64, 64)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.requires_grad_(False)


def oracle_of(tier, patched, family, options):
    """Return a model on which diffusers' own forwards compute what the patched one does."""
    model = build(tier, family, options)
    if tier == "sparse":
        use_processors(Journal(), family_of(model).self_attentions(model), CONFIGS[tier])
    linears = quantized_linears(patched)
    for path, linear in patched.named_modules():
        if linear in linears:
            model.get_submodule(path).weight.data = linear.quantized().dequantize(linear.weight.dtype)
    return model


UNCHANGED = {}


class Models:
    """A patched model beside its oracle, and a third one that was never patched, to compare with after `restore`."""

    def __init__(self, tier, family, change):
        self.tier, self.family, self.change = tier, family, change
        self.patched, self.original = (build(tier, family, change.model) for _ in range(2))
        self.patch = trp.patch(self.patched, CONFIGS[tier])
        has_arithmetic = tier in ("quantized", "sparse")  # of its own, which an unpatched model does not have
        self.oracle = oracle_of(tier, self.patched, family, change.model) if has_arithmetic else self.original
        self.timestep = None  # of the calls, if not the usual ones
        self.limit = QUANTIZED.limits.step if tier == "quantized" else EXACT.limits.fp32

    def run(self, model):
        torch.manual_seed(1)
        SEEN[model].clear()
        cached = hasattr(model, "is_cache_enabled") and model.is_cache_enabled
        inputs = tiny_family_inputs(self.family, model) | dict(self.change.call)
        if self.timestep is not None:
            inputs["timestep"] = self.timestep
        with torch.no_grad(), model.cache_context("cond") if cached else nullcontext():
            return in_one_tensor(self.family, model(**inputs))

    def unchanged(self):
        """Return the oracle's output before the change. Models of the same options have the same."""
        if self.change.call:
            return self.run(self.oracle)
        key = self.tier, self.family, self.change.model
        if key not in UNCHANGED:
            UNCHANGED[key] = self.run(self.oracle)
        return UNCHANGED[key]

    def check(self, previous=None, theirs=None):
        """Compare the patched model with its oracle, whose output is not the previous one; returns its output.

        theirs: the oracle's output if it is known, because nothing changed since its last run.
        """
        ours, theirs = self.run(self.patched), self.run(self.oracle) if theirs is None else theirs
        assert ours.dtype == theirs.dtype
        assert relative_error(ours, theirs) <= self.limit
        if previous is not None:
            assert relative_error(theirs, previous) > 2 * EXACT.limits.fp32
            assert relative_error(ours, theirs) < relative_error(ours, previous)
        for mine, other in zip(SEEN[self.patched], SEEN[self.oracle], strict=True):
            assert (type(mine), mine.dtype, mine.shape) == (type(other), other.dtype, other.shape)
            assert relative_error(mine, other) <= self.limit
        return theirs

    def check_restored(self, theirs=None):
        """Restore; the model must then be the original one, bit by bit. theirs: the oracle's output, if it is known."""
        self.patch.restore()
        assert not any("_turbo_rcm_patch" in name for module in self.patched.modules() for name in vars(module))
        expected = self.run(self.original) if theirs is None or self.oracle is not self.original else theirs
        assert torch.equal(self.run(self.patched), expected)

    def check_said(self, says, rows, theirs):
        """Look for what the summary must say: a part of it, or None if the steps are as they were.

        theirs: the oracle's output.
        """
        says = says.get(self.tier, says[None]) if isinstance(says, dict) else says
        if self.tier != GRAPHS:
            assert self.patch.rows() == rows if says is None else says in self.patch.summary()
            return
        before = tapes.replays(self.patched)
        for _ in range(2):
            self.check(theirs=theirs)
        if says != ANYTHING:
            assert (tapes.replays(self.patched) > before) == (says is None)
        assert (says or "") in tapes.note(self.patched)

    def makers(self):
        """Return the change of each model that changes on its own, as generators."""
        changed = [self.patched] if self.change.shared else [self.patched, self.oracle, self.original]
        return [self.change.make(model) for model in dict.fromkeys(changed)]


@pytest.mark.parametrize(("name", "tier", "family"), CELLS)
def test_a_change_takes_effect_and_is_taken_back(name, tier, family, request):
    if tier == GRAPHS:
        request.getfixturevalue("tape")
    change = CHANGES[name]
    models = Models(tier, family, change)
    output, rows = models.check(theirs=models.unchanged()), models.patch.rows()
    if tier == GRAPHS:
        models.check_said(None, rows, output)
    if tier in change.refused:
        refused(models, rows)
        return
    for says, *_ in zip(*models.makers(), strict=True):
        output = models.check(None if change.silent else output)
        models.check_said(says, rows, output)
    models.check_restored(models.check())


def refused(models, rows):
    """The change raises an error that says what to do, and the model is as it was."""
    before = models.run(models.patched)
    with pytest.raises(RuntimeError, match=RULE):
        list(models.change.make(models.patched))
    assert torch.equal(models.run(models.patched), before)
    assert models.patch.rows() == rows
    models.check_restored()


@pytest.mark.parametrize(("name", "tier"), UNDER)
def test_restore_under_a_change(name, tier):
    change = CHANGES[name]
    models = Models(tier, "wan", change)
    models.run(models.patched)
    makers = models.makers()
    for maker in makers:
        next(maker)
    models.run(models.patched)
    if tier in change.held:
        with pytest.raises(trp.PatchError, match="take the replacement off first"):
            models.patch.restore()
    else:
        models.check_restored()
    for _ in zip(*makers, strict=True):
        pass
    if tier in change.held:
        models.check_restored()
    assert torch.equal(models.run(models.patched), models.run(models.original))


@pytest.mark.parametrize("name", [name for name, change in CHANGES.items() if change.before])
def test_a_change_before_the_patch(name):
    change = CHANGES[name]
    model, original = (build("exact", "wan", change.model) for _ in range(2))
    makers = [change.make(each) for each in ([model] if change.shared else [model, original])]
    says, *_ = (next(maker) for maker in makers)
    run = lambda each: Models.run(SimpleNamespace(change=change, family="wan", timestep=None), each)  # noqa: E731
    expected, attributes = run(original), attributes_of(model)
    if isinstance(change.before, str):
        with pytest.raises(trp.PatchError, match=change.before):
            trp.patch(model)
        assert attributes_of(model) == attributes
    else:
        patch = trp.patch(model)
        assert relative_error(run(model), expected) <= EXACT.limits.fp32
        says = says.get("exact", says[None]) if isinstance(says, dict) else says
        assert (says or "") in patch.summary()
        patch.restore()
    assert torch.equal(run(model), expected)
    for _ in zip(*makers, strict=True):
        pass


@pytest.mark.parametrize(
    ("tier", "family"), [*((tier, "wan") for tier in CONFIGS if tier != GRAPHS), ("exact", "vace")]
)
def test_first_block_cache(tier, family):
    """diffusers knows the blocks of no other family. Every later call is skipped after its first block."""
    models = Models(tier, family, Change(None, model=(("layers", 3),)))
    for model in (models.patched, models.oracle):
        model.enable_cache(FirstBlockCacheConfig(threshold=10.0))
    first = models.check()
    models.timestep = torch.full((2,), 300.0)
    models.check(previous=first)
    for model in (models.patched, models.oracle):
        model.disable_cache()
    models.timestep = None
    models.check_restored()


@pytest.mark.parametrize("tier", [tier for tier in CONFIGS if tier != GRAPHS])
def test_new_sizes_and_prompts_take_effect(tier):
    models = Models(tier, "wan", Change(None))
    previous = models.check()
    prompt = tiny_transformer_inputs(models.patched)["encoder_hidden_states"]
    for call in ({"batch": 1}, {"height": 6}, {"width": 4, "frames": 1}, {"text_tokens": 5}, {}):
        ours, theirs = (run(model, tiny_transformer_inputs(model, **call)) for model in (models.patched, models.oracle))
        assert relative_error(ours, theirs) <= models.limit
    for how in ("in place", "through data", "one element", "swapped"):
        WRITES[how](prompt)
        inputs = {**tiny_transformer_inputs(models.patched), "encoder_hidden_states": prompt}
        ours, theirs = (run(model, inputs) for model in (models.patched, models.oracle))
        assert relative_error(ours, theirs) <= models.limit
        assert relative_error(ours, previous) > EXACT.limits.fp32
        previous = theirs


def run(model, inputs):
    with torch.no_grad():
        return first_of(model(**inputs))


@pytest.mark.parametrize(
    ("name", "checkpointing"), [*((name, False) for name in ["wan", *EACH_MODEL]), ("wan", True), ("anyflow", True)]
)
def test_gradients(name, checkpointing):
    if name.startswith("anyflow far") or name == "animate 2":
        pytest.skip("flex attention has no backward on the CPU")
    results = []
    for is_patched in (True, False):
        model = tiny_family_transformer(name, layers=2).train()
        if is_patched:
            trp.patch(model)
        if checkpointing:
            model.enable_gradient_checkpointing()
        inputs = tiny_family_inputs(name, model)
        leaves = {key: inputs[key] for key in ("hidden_states", "encoder_hidden_states")}
        leaves = {key: value.requires_grad_() for key, value in leaves.items() if isinstance(value, torch.Tensor)}
        run(model, inputs)  # nothing of a generation may reach the graph
        first_of(model(**inputs)).square().mean().backward()
        results.append({**leaves, **dict(model.named_parameters())})
    expected = {path: tensor.grad for path, tensor in results[1].items() if tensor.grad is not None}
    largest = max(gradient.norm() for gradient in expected.values())
    assert expected.keys() == {path for path, tensor in results[0].items() if tensor.grad is not None}
    for path, gradient in expected.items():
        # One that cancels to almost nothing, such as a key bias's, is as exact as larger ones.
        allowed = 1e-5 * max(gradient.norm(), 0.01 * largest)
        assert (results[0][path].grad - gradient).norm() <= allowed, path
