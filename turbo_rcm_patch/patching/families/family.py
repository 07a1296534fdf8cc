"""What the patch must know of a family of models, and how it binds one of its transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...config import PatchConfig
from ...plain import hook_in_place_of_forward
from ..copying import reduce_ex, refuse_replicas
from ..journal import bind, slot_below_hooks
from ..lora.notice_changes import apply_to_tensors, load_lora_adapter
from ..sampling.step_count import Steps
from ..steps.block_sparse import layers_attended_exactly
from ..steps.plan import SHARED, STATE, BlockState, Plans, Shared
from ..weights.weights_written import with_weights_up_to_date

Binding = tuple[nn.Module, str, object]  # (module, attribute, value)
Targets = Sequence[tuple[str, nn.Module, Callable]]  # (path, module, forward)


def embedder_forward(self: nn.Module, timestep: torch.Tensor, *args: object, **kwargs: object) -> object:
    """The forward of a transformer's condition embedder, which runs before the blocks; bound on instances."""
    shared: Shared = getattr(self, SHARED)
    shared.begin_forward()
    return type(self).forward(self, with_weights_up_to_date(timestep, shared.config), *args, **kwargs)


def _embedder(transformer: nn.Module, config: PatchConfig) -> Targets:
    return [("condition_embedder", transformer.condition_embedder, embedder_forward)]


@dataclass(frozen=True)
class Blocks:
    """A list of equal blocks in a transformer. name: its attribute. forward: what replaces the blocks' own."""

    name: str
    block_class: type[nn.Module]
    attention_class: type[nn.Module]
    forward: Callable

    def of(self, transformer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The blocks of a transformer with their paths in it."""
        for index, block in enumerate(getattr(transformer, self.name)):
            yield f"{self.name}.{index}", block


@dataclass(frozen=True)
class Family:
    """A transformer class of diffusers and its blocks.

    models: the checkpoints it is known from. more: (transformer, config) -> (path, module, forward) of what is bound
    besides the blocks. attributes: (transformer, shared, forwards by module) -> bindings of other things.
    notes: lines for the summary on what is not fused besides the steps of the blocks.
    """

    transformer_class: type[nn.Module]
    models: str
    blocks: tuple[Blocks, ...]
    more: Callable[[nn.Module, PatchConfig], Targets] = _embedder
    attributes: Callable[[nn.Module, Shared, dict[nn.Module, object]], Sequence[Binding]] = lambda *_: ()
    notes: Callable[[nn.Module], Sequence[str]] = lambda _: ()

    def every_block(self, transformer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """All blocks of a transformer with their paths in it."""
        return (found for blocks in self.blocks for found in blocks.of(transformer))

    def problems(self, name: str, transformer: nn.Module) -> list[str]:
        """Everything that stands against patching this transformer, as sentences; empty when it can be patched."""
        problems = [
            f"{name}.{path} is a {class_path(block)}, not diffusers' {blocks.block_class.__name__} of "
            f"{self.transformer_class.__name__}."
            for blocks in self.blocks
            for path, block in blocks.of(transformer)
            if type(block) is not blocks.block_class or not _has_known_parts(block, blocks.attention_class)
        ]
        modules = ((path, module) for path, module, _ in self._targets(transformer, PatchConfig()))
        return problems or [
            f"{name}.{path} has a {hook} that holds its old forward; patch first, then add hooks (such as sequential "
            "offload)."
            for path, module in modules
            if (hook := hook_in_place_of_forward(module)) and slot_below_hooks(module) is None
        ]

    def bindings(self, transformer: nn.Module, config: PatchConfig, steps: Steps | None = None) -> list[Binding]:
        """What makes up the patch of one transformer, to be set in order. steps: of its pipeline, if it has one."""
        shared = Shared(config, steps)
        forwards = {module: bind(forward, module) for _, module, forward in self._targets(transformer, config)}
        states: dict[nn.Module, BlockState] = {}
        for blocks in self.blocks:
            exactly = layers_attended_exactly(config, len(getattr(transformer, blocks.name)))
            for index, (_, block) in enumerate(blocks.of(transformer)):
                state = BlockState(shared, blocks.attention_class, Plans(), exactly.get(index))
                if block not in states or states[block].exactly is None:  # it may be in the model twice
                    states[block] = state
        shared.plans = [state.plans for state in states.values()]
        copied = [
            (module, "__reduce_ex__", bind(reduce_ex, module)) for module in dict.fromkeys([transformer, *forwards])
        ]
        return [
            *((block, STATE, state) for block, state in states.items()),
            *self.attributes(transformer, shared, forwards),
            *copied,
            (transformer, "_replicate_for_data_parallel", bind(refuse_replicas, transformer)),
            (transformer, SHARED, shared),
            (transformer.condition_embedder, SHARED, shared),
            (transformer, "load_lora_adapter", bind(load_lora_adapter, transformer)),
            (transformer, "_apply", bind(apply_to_tensors, transformer)),
            *((module, "forward", forward) for module, forward in forwards.items()),
        ]

    def _targets(self, transformer: nn.Module, config: PatchConfig) -> Targets:
        blocks = [(path, block, kind.forward) for kind in self.blocks for path, block in kind.of(transformer)]
        return [*self.more(transformer, config), *blocks]


def class_path(module: nn.Module) -> str:
    """The module's class with where it is defined."""
    return f"{type(module).__module__}.{type(module).__name__}"


def _has_known_parts(block: nn.Module, attention_class: type[nn.Module]) -> bool:
    return all(isinstance(attn, attention_class) for attn in (block.attn1, block.attn2)) and hasattr(block, "ffn")


def compute_dtype(transformer: nn.Module) -> torch.dtype:
    """The dtype of the hidden states that the blocks get."""
    return transformer.patch_embedding.weight.dtype
