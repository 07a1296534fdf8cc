"""The facts that a family of models states, and the patch's bindings for one of its transformers.

A family is a file in this folder, or a folder if its blocks are its own, registered in ``__init__.py``. It states:

1. `Family`: the exact transformer class, the layer that makes the hidden states, and its lists of blocks.
2. `Blocks`, one for each list: the blocks' class and parts, the forward that replaces theirs, the linears that go to 8
   bits, and the self-attention that the sparse tiers replace.
3. The block's forward, which takes what diffusers' takes. Under autocast it runs the class's own forward. Otherwise it
   makes a call: a hashable tuple with a `Call` as ``call``, a `Stream` for each modality, the sizes of prompts, and
   reasons to call a module as a whole. It gets the plan for this call from ``state.plans.get`` and runs it.
4. A plan: steps from ``steps/``, each with its kernel or the reason for another one. Its ``rows()`` list them.
   `Measured` says what `verify` measures in it, `Sizes` what `tune` times and `info` counts.
5. If the family has them: `Pipeline`, the pipelines that sample in few steps; `Case`, the sizes of its checkpoints,
   with `RandomWeights` for models of these sizes.
6. If the family has them, forwards of other modules: ``more``.

Models whose blocks copy Wan's take 3 and 4 from ``wan/``. `wan_block` or a `WanBlock` says what a plan runs on, how
the attentions are called and where the RoPE angles are. `wan_blocks` says the rest. chronoedit.py is the shortest
example. anyflow.py has other processors, RoPE tables and timesteps.

LTX-2 has blocks of its own, in ltx2/: a video and an audio `Stream`, six attentions and two feed-forwards, whose
``rows()`` name the stream, and a forward that returns a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from diffusers import DiffusionPipeline, SchedulerMixin
from torch import nn
from transformers import PretrainedConfig

from ...checkpoints.files import COMPONENTS
from ...checkpoints.lazy import Tensors
from ...checkpoints.names import Names
from ...config import Exact, PatchConfig
from ...keep_list import ATTENTION, KeepList, is_of_attention, keeps_attention
from ...plain import hook_in_place_of_forward
from ...scheduler import RCMScheduler
from ...tiers import Tier
from ...wording import with_article
from ..copying import reduce_ex, refuse_replicas
from ..errors import KeepError
from ..journal import bind, slot_below_hooks
from ..lora.notice_changes import apply_to_tensors, load_lora_adapter
from ..sampling.step_count import Steps
from ..steps.block_sparse import layers_attended_exactly
from ..steps.plan import SHARED, STATE, Attends, BlockCall, BlockState, Call, Plans, Shared, Step
from ..steps.sparse_linear import SelfAttention, SparseForm
from ..weights.quantize_linears import ROWS_KNOWN, LinearAt
from .graphs import TransformerGraphs

Binding = tuple[nn.Module, str, object]  # (module, attribute, value)
Outputs = Mapping[str, torch.Tensor]  # of modules, by path
Targets = Sequence[tuple[str, nn.Module, Callable]]  # (path, module, forward)

GRAPH = "_turbo_rcm_patch_graph"  # the attribute of a patched transformer that holds its CUDA graphs
KEPT = "named in keep"  # the reason why a self-attention computes in the model's dtype


class BlockPlan(Protocol):
    """The steps of a block for one kind of call.

    residual: str() of it tells how the residual is stored between the skips. attends: the attention within
    `Blocks.self_attention`, or None if that is called as a whole, or never in 8 bits or sparse.
    """

    residual: object
    attends: Attends | None

    def rows(self) -> Iterator[tuple[str, str, tuple[Step, ...]]]:
        """Yield (sub-layer, step, its parts) in order."""


def graph_of(transformer: nn.Module) -> TransformerGraphs | None:
    """Return the CUDA graphs of a patched transformer, or None if its family has none."""
    return vars(transformer).get(GRAPH)


class Sizes(NamedTuple):
    """The sizes of the tensors in a transformer's blocks, from its config, before there is a model.

    needed: the entries of the config that this needs.
    tokens: (config, latent) -> the tokens of a sample. latent: its frames, height and width.
    ops: (config, tokens) -> the ops that `turbo-rcm tune` times, each with its sizes.
    bytes_per_token: (config, bytes of a value in the model's dtype, tier) -> the largest set of a block's tensors that
        are alive together.
    bytes_with_timesteps: (config, bytes of a value in the model's dtype, the same in scale_shift_table,
        bytes_per_token) -> the same if each token has its own timestep, and the largest set that is alive after the
        blocks.
    unpatched_bytes_per_token: (config, bytes of a value in the model's dtype, bytes of a value in its LoRAs or 0, True
        if each token has its own timestep) -> the largest set of tensors in a step of diffusers' own code.
    feed_forward: (config) -> the channels within the feed-forward.
    bytes_after_blocks: (config, bytes of a value in the model's dtype) -> the largest set of tensors that are alive
        after the blocks, for each token. 0: never more than in a block.
    given_images: how many images a plan counts as more latent frames of a step.
    given_bytes: (config, height, width, frames, bytes of a value in the model's dtype, the same in the VAE's) -> the
        bytes of given videos on the GPU while the VAE encodes them, and after that. None: no videos are given.
    """

    needed: tuple[str, ...]
    tokens: Callable[[Mapping[str, object], tuple[int, int, int]], int]
    ops: Callable[[Mapping[str, object], int], Iterator[tuple[str, tuple[int, ...]]]]
    bytes_per_token: Callable[[Mapping[str, object], int, Tier], int]
    bytes_with_timesteps: Callable[[Mapping[str, object], int, int, int], tuple[int, int]]
    unpatched_bytes_per_token: Callable[[Mapping[str, object], int, int, bool], int]
    feed_forward: Callable[[Mapping[str, object]], int]
    bytes_after_blocks: Callable[[Mapping[str, object], int], int] = lambda config, wide: 0
    given_images: int = 0
    given_bytes: Callable[[Mapping[str, object], int, int, int, int, int], tuple[int, int]] | None = None


class RandomWeights(NamedTuple):
    """Changes in place that make a block's random weights more like trained ones.

    strengthen_gates: (block) -> None. The block then changes its input about as much as it keeps of it.
    undo_outliers: (block, channels, size) -> None. Hidden channels that are this much larger then weigh as the others.
    sharpen_attention: (block, gain) -> None. Attention then picks out a few keys.
    """

    strengthen_gates: Callable[[nn.Module], None]
    undo_outliers: Callable[[nn.Module, torch.Tensor, float], None]
    sharpen_attention: Callable[[nn.Module, float], None]


class Measured(NamedTuple):
    """The measurements of `verify` within a block. oracle: the block without the patch, in fp32.

    inputs: (block, the arguments of its forward) -> what its plan runs on.
    terms: (block, plan, inputs, outputs) -> three values for each sub-layer that is not called as a whole. They are its
        name in ``PatchConfig.fuse``, the term that it adds to the hidden states, and the oracle's term. outputs: the
        outputs of the oracle's modules by path.
    qkv: (oracle, args, kwargs, outputs) -> q, k and v [B, S, H, D] of `Blocks.self_attention`, rotated. None if
        no plan has `BlockPlan.attends`.
    """

    inputs: Callable[..., object]
    terms: Callable[[nn.Module, BlockPlan, object, Outputs], Iterator[tuple[str, torch.Tensor, torch.Tensor]]]
    qkv: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None


@dataclass(frozen=True)
class Blocks:
    """A list of equal blocks in a transformer, and what the general code asks about them.

    Attributes:
        name: the transformer's attribute that holds the list.
        block_class: the class of every block; another one is refused.
        forward: replaces the blocks' forward; bound on instances.
        parts: the submodules that every block must have, with their classes, by path.
        decide: (block, call) -> the block's plan for one kind of call.
        usual_call: adds a usual video's sizes to what every family has: the call that the summary shows before a
            block was called.
        linears: the linears that an 8-bit tier converts, by the name in ``PatchConfig.fuse`` that they belong to.
            Embeddings, modulation and norms are not among them.
        self_attention: the path of the self-attention that the sparse tiers replace.
        measured: what `verify` measures within a block.
        sizes: the sizes of its tensors.
        sparse: how sparse-linear attention replaces the self-attention, or None if it cannot.
        random_weights: how random weights are made more like trained ones, or None for a family without cases.
        kind: what `forward` reads about these blocks, if it is shared by blocks that differ. Else None.
    """

    name: str
    block_class: type[nn.Module]
    forward: Callable
    parts: Mapping[str, type[nn.Module]]
    decide: Callable[[nn.Module, BlockCall], BlockPlan]
    usual_call: Callable[[Call], BlockCall]
    linears: Mapping[str, tuple[str, ...]]
    self_attention: str
    measured: Measured
    sizes: Sizes
    sparse: SparseForm | None = None
    random_weights: RandomWeights | None = None
    kind: object = None

    def self_attention_of(self, block: nn.Module) -> nn.Module:
        """Return the self-attention of a block that the sparse tiers replace."""
        return block.get_submodule(self.self_attention)

    def of(self, transformer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The blocks of a transformer with their paths in it."""
        for index, block in enumerate(getattr(transformer, self.name)):
            yield f"{self.name}.{index}", block


class Pipeline(NamedTuple):
    """A pipeline class of diffusers whose sampler can be replaced, with its subclasses.

    starts_from: "text", "image" or "video", what a video is made from. Image pipelines take the recipes for image to
    video. adds_noise: True if ``prepare_latents`` calls ``scheduler.add_noise``, which has scaled the noise. If not,
    its first result is the noise, which is scaled afterwards. is_modular: True if its blocks have that method.
    has_sound: True for LTX-2's, which sample sound with a copy of the scheduler, prepare unit noise before they choose
    the times, and have several kinds of guidance. frames: how many a call makes by default, where its signature does
    not say. frame_rate: (pipeline) -> the frames per second of the videos that its model was made for, or None for a
    pipeline that no command runs.
    """

    pipeline_class: type[DiffusionPipeline]
    starts_from: str
    adds_noise: bool = False
    is_modular: bool = False
    has_sound: bool = False
    frames: int | None = None
    frame_rate: Callable[[DiffusionPipeline], int] | None = None


class PipelineInputs(NamedTuple):
    """The sizes of random inputs for a call of a pipeline.

    prompt: tokens of a prompt, and the channels of its embeddings.
    latents: (height, width, frames) -> the size [C, ...] of each argument with latents of a video of that size.
    more: other arguments.
    """

    prompt: tuple[int, int]
    latents: Callable[[int, int, int], Mapping[str, tuple[int, ...]]]
    more: Mapping[str, object]


@dataclass(frozen=True)
class Case:
    """The classes of a transformer, a pipeline and a VAE, the configs of both models, and the usual size of a video.

    The pipeline works without encoders. scheduler: makes the pipeline's. expand_timesteps: True if each token has its
    own timestep. encoders: the class and config of each encoder that the checkpoint comes with, by its name in the
    pipeline. others: the class and arguments of each other model that the pipeline runs, by its name. stand_ins: the
    classes of models that take the place of some of these in a pipeline with random weights. experts: 2 for two
    transformers of this config, of which the first makes the steps with much noise. boundary: the share of the noise
    down to which it does.
    """

    transformer_class: type[nn.Module]
    pipeline_class: type[DiffusionPipeline]
    vae_class: type[nn.Module]
    transformer: Mapping[str, object]
    height: int
    width: int
    frames: int
    vae: Mapping[str, object] = field(default_factory=dict)
    expand_timesteps: bool = False
    encoders: Mapping[str, tuple[type[nn.Module], PretrainedConfig]] = field(default_factory=dict)
    others: Mapping[str, tuple[type[nn.Module], Mapping[str, object]]] = field(default_factory=dict)
    stand_ins: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    scheduler: Callable[[], SchedulerMixin] = RCMScheduler
    experts: int = 1
    boundary: float | None = None

    @property
    def transformer_names(self) -> tuple[str, ...]:
        """The names of the transformers in the pipeline."""
        return COMPONENTS[: self.experts]

    @property
    def pipeline_options(self) -> dict[str, object]:
        """The options of the pipeline beside its models."""
        options = {"expand_timesteps": True} if self.expand_timesteps else {}
        return options if self.boundary is None else {**options, "boundary_ratio": self.boundary}


@dataclass(frozen=True)
class Family:
    """A transformer class of diffusers and its blocks.

    Attributes:
        transformer_class: the exact class.
        models: the checkpoints it is known from.
        blocks: its lists of blocks, in the order of the summary.
        first_layer: the path of the module that makes the blocks' hidden states; its weight has their dtype and device.
        names: its authors' names of modules and parameters, as files have them.
        more: (transformer, config) -> (path, module, forward) of every other module whose forward is bound. These get
            the transformer's `Shared` too.
        attributes: (transformer, shared, forwards by module) -> bindings of other things.
        pipelines: those whose sampler `use_rcm` and `use_distilled` can replace.
        cases: sizes of its checkpoints by name, with which the command line and the benchmarks build random models.
        inputs: (pipeline) -> the sizes of random inputs for it, for a family with cases.
        linears_in_loras: (transformer) -> the paths of the linears that every LoRA of a distilled model changes. None:
            its LoRAs are not recognised.
        rows_known: how a linear's path ends if the largest value of each row of its input is known.
        from_files: (file, its tensors) -> the transformer, on the meta device, that a file with its authors' names
            holds. Raises ValueError for a file of another model. None if no such files are known.
        notes: lines for the summary about what is not fused apart from the steps of the blocks.
    """

    transformer_class: type[nn.Module]
    models: str
    blocks: tuple[Blocks, ...]
    first_layer: str
    names: Names
    more: Callable[[nn.Module, PatchConfig], Targets] = lambda *_: ()
    attributes: Callable[[nn.Module, Shared, dict[nn.Module, object]], Sequence[Binding]] = lambda *_: ()
    notes: Callable[[nn.Module], Sequence[str]] = lambda _: ()
    pipelines: tuple[Pipeline, ...] = ()
    cases: Mapping[str, Case] = field(default_factory=dict)
    inputs: Callable[[DiffusionPipeline], PipelineInputs] | None = None
    linears_in_loras: Callable[[nn.Module], set[str]] | None = None
    rows_known: tuple[str, ...] = ROWS_KNOWN
    from_files: Callable[[Path, Tensors], nn.Module] | None = None

    def every_block(self, transformer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Return all blocks of a transformer with their paths in it."""
        return (found for blocks in self.blocks for found in blocks.of(transformer))

    def self_attentions(self, transformer: nn.Module) -> Iterator[SelfAttention]:
        """The self-attentions that the sparse tiers replace."""
        for blocks in self.blocks:
            for path, block in blocks.of(transformer):
                attn = blocks.self_attention_of(block)
                yield SelfAttention(f"{path}.{blocks.self_attention}", attn, blocks.sparse)

    def linears(self, transformer: nn.Module) -> Iterator[LinearAt]:
        """The linears that an 8-bit tier converts."""
        for blocks in self.blocks:
            for path, block in blocks.of(transformer):
                for sub_layer, names in blocks.linears.items():
                    yield from (LinearAt(path, block, name, sub_layer) for name in names)

    def check_keep(self, transformer: nn.Module, config: PatchConfig) -> None:
        """Raise KeepError if a name in ``config.keep`` fits nothing in a transformer, or is of another one's list."""
        if isinstance(config.keep, KeepList):
            reason = config.keep.why_not_for(type(transformer).__name__, transformer.config)
            if reason is not None:
                raise KeepError(reason)
        modules = [path for path, _ in transformer.named_modules(remove_duplicate=False)]
        attentions = [f"{path}{ATTENTION}" for path, *_ in self.self_attentions(transformer)]
        for pattern in config.keep:
            kind, paths = ("self-attention", attentions) if is_of_attention(pattern) else ("module", modules)
            if not any(fnmatchcase(path, pattern) for path in paths):
                raise KeepError(
                    f"keep={pattern!r} fits no {kind} of the {type(transformer).__name__}; give paths in it, such as "
                    f"{attentions[0]} or {modules[-1]}."
                )

    def compute_dtype(self, transformer: nn.Module) -> torch.dtype:
        """Return the dtype of the hidden states that the blocks get."""
        return transformer.get_submodule(self.first_layer).weight.dtype

    def problems(self, name: str, transformer: nn.Module) -> list[str]:
        """Return the reasons, as sentences, why this transformer cannot be patched. Empty if it can."""
        problems = [
            problem
            for blocks in self.blocks
            for path, block in blocks.of(transformer)
            for problem in self._problems_of(f"{name}.{path}", block, blocks)
        ]
        modules = ((path, module) for path, module, _ in self._targets(transformer, Exact()))
        return problems or [
            f"{name}.{path} has a {hook} that holds its old forward; patch first, then add hooks (such as sequential "
            "offload)."
            for path, module in modules
            if (hook := hook_in_place_of_forward(module)) and slot_below_hooks(module) is None
        ]

    def bindings(self, transformer: nn.Module, config: PatchConfig, steps: Steps | None = None) -> list[Binding]:
        """Return the bindings that patch one transformer, in the order to set them.

        steps: the step counter of its pipeline, or None.
        """
        shared = Shared(config, steps)
        beside = [module for _, module, _ in self.more(transformer, config)]
        forwards = {module: bind(forward, module) for _, module, forward in self._targets(transformer, config)}
        states: dict[nn.Module, BlockState] = {}
        for blocks in self.blocks:
            exactly = layers_attended_exactly(config, len(getattr(transformer, blocks.name)))
            for index, (path, block) in enumerate(blocks.of(transformer)):
                kept = KEPT if keeps_attention(f"{path}.{blocks.self_attention}", config.keep) else None
                state = BlockState(shared, blocks.kind, Plans(), kept or exactly.get(index))
                if block not in states or states[block].exactly is None:  # it may be in the model twice
                    states[block] = state
        copied = [
            (module, "__reduce_ex__", bind(reduce_ex, module)) for module in dict.fromkeys([transformer, *forwards])
        ]
        return [
            *((block, STATE, state) for block, state in states.items()),
            *self.attributes(transformer, shared, forwards),
            *copied,
            (transformer, "_replicate_for_data_parallel", bind(refuse_replicas, transformer)),
            *((module, SHARED, shared) for module in dict.fromkeys([transformer, *beside])),
            (transformer, "load_lora_adapter", bind(load_lora_adapter, transformer)),
            (transformer, "_apply", bind(apply_to_tensors, transformer)),
            *((module, "forward", forward) for module, forward in forwards.items()),
        ]

    def _problems_of(self, path: str, block: nn.Module, blocks: Blocks) -> list[str]:
        """Return the reasons, as sentences, why the block at this path cannot be patched. Empty if it can."""
        if type(block) is not blocks.block_class:
            return [
                f"{path} is {with_article(class_path(block))}, not diffusers' {blocks.block_class.__name__} of "
                f"{self.transformer_class.__name__}."
            ]
        modules = dict(block.named_modules(remove_duplicate=False))
        return [
            _problem_of_part(path, part, modules.get(part), accepted)
            for part, accepted in blocks.parts.items()
            if not isinstance(modules.get(part), accepted)
        ]

    def _targets(self, transformer: nn.Module, config: PatchConfig) -> Targets:
        blocks = [(path, block, kind.forward) for kind in self.blocks for path, block in kind.of(transformer)]
        return [*self.more(transformer, config), *blocks]


def class_path(module: nn.Module) -> str:
    """The module's class with where it is defined."""
    return f"{type(module).__module__}.{type(module).__name__}"


def _problem_of_part(block: str, name: str, part: nn.Module | None, accepted: type[nn.Module]) -> str:
    """Return the sentence that refuses a part of the block at a path: it is missing, or not of the accepted class."""
    wanted = "a module" if accepted is nn.Module else f"diffusers' {accepted.__name__} or a subclass of it"
    if part is None:
        return f"{block} has no {name}; give it {wanted}, then patch."
    return f"{block}.{name} is {with_article(class_path(part))}; replace it with {wanted}, then patch."
