"""The plan of a patched block: its steps, chosen once per kind of call. The forward runs it and the summary prints it.

A plan is made again only if something about the block's modules changed: classes, hooks, attributes, or the kind of
their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.autograd.forward_ad as fwAD
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import nn
from torch.nn import functional as F

from ... import kernels
from ...config import PatchConfig
from ...kernels.attention.sdpa import PYTORCHS
from ...kernels.choice.registry import Kernel, Op, Pick, Spec
from ...plain import is_transformed
from ..changes import Snapshot
from ..lora.inside_projections import LIVE, Linears, Products
from ..sampling.step_count import Steps

REFERENCE = "torch reference"
MODULE, LINEAR = "PyTorch module", "PyTorch linear"
NOTHING = "nothing"  # the step of a module that does nothing

Plan = TypeVar("Plan")


class Step(NamedTuple):
    """One step of a block.

    run: the function that the forward calls.
    kernel: the name of the kernel or module for the summary. reason: why it is not the fused kernel, or None.
    takes, gives: the 8-bit format of its input and of its result, or None.
    pick: the chosen kernel, or None if a module is called.
    """

    run: Callable
    kernel: str
    reason: str | None = None
    takes: torch.dtype | None = None
    gives: torch.dtype | None = None
    pick: Pick | None = None

    def fed_by(self, producer: Step | None) -> Step:
        """Return the step, with a reason if its input is quantised in a separate pass.

        producer: the step that makes the input, or None if it comes from outside the block.
        """
        apart = self.takes is not None and (producer is None or producer.gives != self.takes)
        return self._replace(reason=self.reason or "quantised in a pass of its own") if apart else self


class Stream(NamedTuple):
    """The hidden states that go through a block, [B, S, C]; a block of several modalities has several.

    samples: B. tokens: B·S. gate: the gate has one row for each "sample", "token" or "run".
    """

    samples: int
    tokens: int
    gate: str = "sample"

    @property
    def tokens_per_sample(self) -> int:
        """S."""
        return self.tokens // self.samples


class Attends(NamedTuple):
    """The step that attends, within a self-attention. in_8_bits: True if it takes q, k and v in 8 bits."""

    step: Step
    in_8_bits: bool


class Call(NamedTuple):
    """The facts that decide kernels in every family, besides a block's modules and the shapes of its streams.

    derivative: "backward" if autograd records the call, "forward" in forward mode or under another function transform,
        else None.
    backend: diffusers' backend for attention.
    exactly: the reason why self-attention runs at full precision over all keys in a tier that approximates it, or None.
    products: prepares the products of LoRA layers.
    sdpa: F.scaled_dot_product_attention, which programs may replace.
    """

    config: PatchConfig
    device: torch.device
    dtype: torch.dtype
    derivative: str | None
    backend: AttentionBackendName
    exactly: str | None = None
    products: Products | None = None
    sdpa: Callable = PYTORCHS

    def read(self, *modules: nn.Module) -> Linears:
        """Return the linears in these modules, which share one input, and their LoRA layers."""
        products = self.products if self.products is not None else Products()
        return products.read(modules, self.device, self.dtype, differentiated=self.derivative is not None)

    def pick(self, registered: Op, kind: type[Spec] | None = None, **fields: object) -> Pick:
        """Return the kernel of an op. If none can run, it is one that raises the reasons when it is launched.

        kind, fields: of the spec. Its dtype is the call's unless the fields have one.
        """
        try:
            return registered.pick(self.spec(kind, **fields))
        except ValueError as error:
            return Pick(Kernel("no kernel", lambda _: None, partial(_raise, str(error))))

    def spec(self, kind: type[Spec] | None = None, **fields: object) -> Spec:
        """Return the spec of a call. kind, fields: as of `pick`."""
        own = {"device": self.device, "dtype": self.dtype, "derivative": self.derivative}
        kind = Spec if kind is None else kind  # a default that is a class would stop torch.compile
        return kind(**{**own, "implementation": self.config.implementation, **fields})


def _raise(message: str, *_: object) -> None:
    raise ValueError(message)


class BlockCall(Protocol):
    """One kind of call of a family's block, hashable: what every family has, and the family's own, such as prompts.

    stream: the hidden states that go through the self-attention that the sparse tiers replace.
    """

    call: Call
    stream: Stream


def call_of(state: BlockState, block: nn.Module, x: torch.Tensor, *others: torch.Tensor) -> Call:
    """Return the Call for a block's hidden states x and its other inputs that may require a gradient."""
    shared = state.shared
    now = derivative_of(block, x, *others), active_backend(), state.exactly or shared.why_exact_attention()
    return Call(shared.config, x.device, x.dtype, *now, shared.products, F.scaled_dot_product_attention)


def active_backend() -> AttentionBackendName:
    """Return diffusers' attention backend for processors that name none."""
    return _AttentionBackendRegistry.get_active_backend()[0]


def derivative_of(module: nn.Module, *inputs: torch.Tensor) -> str | None:
    """Return `Call.derivative` for a module and its inputs."""
    if fwAD._current_level >= 0 or is_transformed():
        return "forward"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *module.parameters())):
        return "backward"
    return None


class Plans:
    """The plans of one block by kind of call, kept while nothing about its modules changes."""

    KEPT = 8  # kinds of calls

    def __init__(self):
        self._known: tuple[nn.Module, Snapshot, dict[BlockCall, object]] | None = None
        self.latest: BlockCall | None = None

    def get(self, block: nn.Module, call: BlockCall, decide: Callable[[nn.Module, BlockCall], Plan]) -> Plan:
        """Return ``decide(block, call)``, or the plan it made before for such a call if the block is unchanged."""
        if torch.compiler.is_compiling() or call.call.derivative == "forward":
            return decide(block, call)  # in a traced call torch.compile's own guards notice changes
        self.latest = call
        plans = self._unchanged(block)
        if plans is None:
            plans = {}
            self._known = block, Snapshot(_objects(block), addresses=False, live=LIVE), plans
        plan = plans.get(call)
        if plan is None:
            if len(plans) >= self.KEPT:
                plans.clear()
            plan = plans[call] = decide(block, call)
        return plan

    def shown(self, block: nn.Module, call: BlockCall, decide: Callable[[nn.Module, BlockCall], Plan]) -> Plan:
        """Return the plan that `get` would return, for a call that does not happen: nothing is kept."""
        plan = (self._unchanged(block) or {}).get(call)
        return decide(block, call) if plan is None else plan

    def _unchanged(self, block: nn.Module) -> dict[BlockCall, object] | None:
        """Return the plans of a block, or None if something about its modules changed since they were made."""
        known = self._known
        is_of_block = known is not None and known[0] is block  # not in a shallow copy, which shares this object
        return known[2] if is_of_block and known[1].holds() else None

    @property
    def ran(self) -> object | None:
        """The plan of the latest call, or None."""
        return None if self._known is None else self._known[2].get(self.latest)

    def __reduce__(self) -> tuple:
        """Copy and pickle as empty: plans belong to the copied modules."""
        return Plans, ()


def _objects(block: nn.Module) -> Iterable[object]:
    modules = list(block.modules())
    return modules + [m.processor for m in modules if "processor" in vars(m)]


STATE = "_turbo_rcm_patch"  # the attribute of a patched block that holds its BlockState
SHARED = "_turbo_rcm_patch_shared"  # the attribute of a transformer and of patched modules beside its blocks: Shared


class Shared:
    """The state that the patched modules of one transformer share.

    Attributes:
        config: the PatchConfig.
        compiles_ahead: True until a block has compiled the kernels of all steps ahead of its first run.
        saturation: notes if a residual was too large for its dtype and was clamped.
        has_warned: the user was already warned about saturation.
        runs: the runs of tokens with equal timesteps that were found last, or None. A forward may have none of its own.
            LTX-2 keeps a dictionary of what each embedder made last, because it has several.
        timestep_runs: the runs of equal timesteps that were found ahead of the forward under way, or None.
        steps: tells the pipeline's present step. None for a model that was patched alone.
        products: the prepared products of LoRA layers.
        from_file: a line for the summary on weights from an 8-bit file, or None.
    """

    def __init__(self, config: PatchConfig, steps: Steps | None = None):
        self.config, self.steps, self.compiles_ahead, self.has_warned = config, steps, True, False
        self.runs = self.timestep_runs = None
        self.products, self.saturation = Products(), kernels.Saturation()
        self.from_file: str | None = None

    def why_exact_attention(self) -> str | None:
        """Return why self-attention runs at full precision in the present step, or None if it runs as the tier says."""
        counts = self.config.exact_steps
        if counts is None or self.steps is None:
            return None
        return "steps unknown to torch.compile" if torch.compiler.is_compiling() else self.steps.why_exact(*counts)

    def __getstate__(self) -> dict[str, object]:
        """Leave the runs out of copies and pickles, because they belong to one forward."""
        return {**self.__dict__, "runs": None, "timestep_runs": None}


class BlockState(NamedTuple):
    """The patch's state on a block.

    kind: as in `Blocks` (families/family.py). exactly: the reason why self-attention runs at full precision in every
    step, or None.
    """

    shared: Shared
    kind: object
    plans: Plans
    exactly: str | None = None


def state_of(block: nn.Module) -> BlockState:
    """Return the patch's state on a block."""
    return getattr(block, STATE)


def is_patched(block: nn.Module) -> bool:
    """True if a block, or the block that it wraps, was in the model when it was patched."""
    return hasattr(block, STATE)
