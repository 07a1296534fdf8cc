"""A handle that makes an ordinary ``pipe(...)`` call sample in few steps, and undoes it.

Such a pipeline gives its scheduler's ``step`` no generator, never scales the first noise and uses guidance by default.
The handle corrects all three where the pipeline prepares its latents: it replaces that method on the instance. A copy
of the pipeline samples with its own scheduler, generator and guidance. Another pipeline with the same components does
not have the method; its first step is an error.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial

from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.guiders import BaseGuidance
from diffusers.modular_pipelines import ModularPipelineBlocks

from ...plain import function_bound_to
from ...scheduler import FewStepScheduler
from ..copying import reduce_ex
from ..families import PIPELINES, pipeline_of
from ..journal import bind
from ..restoring import Handle

logger = logging.getLogger(__name__)

HANDLE = "_turbo_rcm_patch_sampler"  # the attribute of a pipeline, and of its copies, that holds the handle


def check_pipeline(pipe: object, caller: str) -> None:
    """Raise TypeError, ValueError or RuntimeError unless ``caller`` can install a few-step sampler on it."""
    if pipeline_of(pipe) is None:
        supported = ", ".join(pipeline.pipeline_class.__name__ for pipeline in PIPELINES)
        raise TypeError(f"{caller} does not know {type(pipe).__name__}; supported are {supported}.")
    if pipeline_of(pipe).has_sound and caller == "use_rcm":
        raise TypeError(
            f"use_rcm is for Wan, not for {type(pipe).__name__}; call use_distilled with recipe='turbot2av'."
        )
    if pipe.scheduler is None:
        raise ValueError(f"this {type(pipe).__name__} has no scheduler; load the pipeline with one.")
    active = vars(pipe).get(HANDLE)
    if active is None:
        return
    if active.pipe is not pipe:
        raise RuntimeError(f"this is a copy of a pipeline that {active.caller} was called on; copy it after restore().")
    raise RuntimeError(f"{active.caller} is active on this pipeline; call restore() on its handle first.")


def may_guide(pipe: object) -> bool:
    """True unless a few-step sampler on a pipeline, or on the one that it is a copy of, turns guidance off."""
    handle = vars(pipe).get(HANDLE)
    return handle is None or handle._classifier_free_guidance


def check_experts(pipe: DiffusionPipeline, timesteps: Sequence[float], boundary_ratio: float | None) -> None:
    """Raise ValueError if a timestep belongs to a transformer that the pipeline does not have.

    boundary_ratio: as in the pipeline's config. The high-noise transformer runs the timesteps from there up.
    """
    boundary = 0 if boundary_ratio is None else boundary_ratio * train_timesteps(pipe)
    for timestep in timesteps:
        name, noise = ("transformer", "high") if timestep >= boundary else ("transformer_2", "low")
        if getattr(pipe, name, None) is None and boundary_ratio is None:
            raise ValueError(f"this {type(pipe).__name__} has no {name}; load it with its {name}.")
        if getattr(pipe, name, None) is None:
            low_only = "; for all steps by transformer_2, call pipe.register_to_config(boundary_ratio=1.001)"
            raise ValueError(
                f"the step at timestep {timestep:g} belongs to the {noise}-noise {name}, which this pipeline does not "
                f"have: boundary_ratio is {boundary_ratio}. Load both{low_only if noise == 'high' else ''}."
            )


def boundary_timestep(pipe: DiffusionPipeline) -> float | None:
    """Return the timestep where a pipeline changes from its high-noise to its low-noise transformer, or None."""
    ratio = pipe.config.get("boundary_ratio")
    return None if ratio is None else ratio * train_timesteps(pipe)


def train_timesteps(pipe: DiffusionPipeline) -> int:
    """Return the network's timestep at t = 1."""
    return pipe.scheduler.config.get("num_train_timesteps", 1000)


def _prepare_latents(pipe: DiffusionPipeline, *args, **kwargs):
    """Replace a pipeline's prepare_latents. pipe: the one that is called, perhaps a copy of the handle's."""
    return vars(pipe)[HANDLE].prepare_latents(pipe, None, *args, **kwargs)


def _encode_prompt(pipe: DiffusionPipeline, *args, **kwargs):
    """Replace the encode_prompt of a pipeline with sound. pipe: as above."""
    return vars(pipe)[HANDLE].encode_prompt(pipe, *args, **kwargs)


def _prepare_latents_of_block(own: Callable, pipe: ModularPipeline, *args, **kwargs):
    """Replace the static method ``own`` of a modular pipeline's block. pipe: as above, or any that has the block."""
    handle = vars(pipe).get(HANDLE)
    return own(pipe, *args, **kwargs) if handle is None else handle.prepare_latents(pipe, own, *args, **kwargs)


def _encode_prompt_of_block(own: Callable, *args, **kwargs):
    """Replace a block's encode_prompt: encode the negative prompt too, without which it raises UnboundLocalError."""
    return own(*args, **{**kwargs, "prepare_unconditional_embeds": True})


def _few_step(blocks: ModularPipelineBlocks) -> ModularPipelineBlocks:
    """Return a copy of a modular pipeline's blocks, which pipelines may share, with the methods of _OF_BLOCKS."""
    blocks = copy.deepcopy(blocks)
    _replace_methods(blocks)
    return blocks


def _replace_methods(blocks: ModularPipelineBlocks):
    for block in blocks.sub_blocks.values():
        for name, replacement in _OF_BLOCKS.items():
            if hasattr(block, name):
                setattr(block, name, partial(replacement, getattr(block, name)))
        _replace_methods(block)


def _guiders_off(pipe: ModularPipeline) -> dict[str, BaseGuidance]:
    """Return copies of a modular pipeline's guiders by name, disabled. Other pipelines may share the originals."""
    guiders = {name: getattr(pipe, name, None) for name in ("guider", "guider_2")}
    off = {name: copy.copy(guider) for name, guider in guiders.items() if guider is not None}
    for guider in off.values():
        guider.disable()
    return off


# A pipeline with sound keeps its guidance in these attributes. It encodes prompts for it before it prepares latents.
_NO_GUIDANCE = {
    f"_{stream}{name}": off
    for stream in ("", "audio_")
    for name, off in (("guidance_scale", 1.0), ("stg_scale", 0.0), ("modality_scale", 1.0), ("guidance_rescale", 0.0))
}
_OF_BLOCKS = {"prepare_latents": _prepare_latents_of_block, "encode_prompt": _encode_prompt_of_block}


class FewStepHandle(Handle):
    """The changes of ``caller`` to a pipeline, its scheduler and its prepare_latents. ``restore()`` undoes both."""

    def __init__(
        self, pipe: DiffusionPipeline, scheduler: FewStepScheduler, classifier_free_guidance: bool, caller: str
    ):
        self.pipe, self.scheduler, self.caller = pipe, scheduler, caller
        self._classifier_free_guidance, self._warned = classifier_free_guidance, False
        self._original_scheduler = pipe.scheduler
        ours = {HANDLE: self, "__reduce_ex__": bind(reduce_ex, pipe)}
        if pipeline_of(pipe).is_modular:
            ours |= {"_blocks": _few_step(pipe._blocks), **({} if classifier_free_guidance else _guiders_off(pipe))}
        else:
            ours["prepare_latents"] = bind(_prepare_latents, pipe)
            if pipeline_of(pipe).has_sound:
                ours["encode_prompt"] = bind(_encode_prompt, pipe)
        self._ours = list(ours)
        self._replaced = {name: vars(pipe)[name] for name in ours if name in vars(pipe)}
        scheduler.driver = caller
        pipe.scheduler = scheduler
        vars(pipe).update(ours)
        self.active = True

    def restore(self) -> None:
        """Put the original scheduler object and prepare_latents back.

        Copies of the pipeline must not be called any more. Raises RuntimeError when called twice, and when either was
        replaced since; nothing changes then.
        """
        self._check_restorable()
        self.pipe.scheduler = self._original_scheduler
        for name in self._ours:
            del vars(self.pipe)[name]
        vars(self.pipe).update(self._replaced)
        self.active = False

    def _check_restorable(self):
        if not self.active:
            raise RuntimeError(f"this {self.caller} is restored already.")
        own = vars(self.pipe)
        held = {"scheduler": own.get("scheduler") is self.scheduler}
        for name, function in (("prepare_latents", _prepare_latents), ("encode_prompt", _encode_prompt)):
            held[name] = name not in self._ours or function_bound_to(self.pipe, own.get(name)) is function
        for name, is_ours in held.items():
            if not is_ours:
                raise RuntimeError(f"pipe.{name} was replaced after {self.caller}; undo that first, then restore.")

    def prepare_latents(self, pipe: DiffusionPipeline, of_block: Callable | None, *args, **kwargs):
        """Run the pipeline's own prepare_latents, which alone knows the call's generator and makes the first noise.

        pipe: the handle's pipeline, or a copy of it. of_block: for a modular pipeline, its block's prepare_latents.
        """
        scheduler = pipe.scheduler
        if not self.active:
            raise RuntimeError(f"{self.caller} was restored on the pipeline that this is a copy of; copy it again.")
        if not hasattr(scheduler, "bind_generator"):  # servers wrap schedulers in objects that pass attributes on
            raise RuntimeError(f"pipe.scheduler was replaced after {self.caller}; put it back and restore() first.")
        check_experts(pipe, scheduler.timesteps.tolist(), pipe.config.get("boundary_ratio"))
        own = self._replaced.get("prepare_latents") or partial(of_block or type(pipe).prepare_latents, pipe)
        call = inspect.signature(own).bind(*args, **kwargs)
        if pipeline_of(pipe).has_sound:
            scheduler.bind_generator(call.arguments.get("generator"), before_times=True)
            return own(*args, **kwargs)
        scheduler.bind_generator(call.arguments.get("generator"))
        if of_block is None and pipe.guidance_scale > 1 and not self._classifier_free_guidance:
            self._turn_guidance_off(pipe)
        prepared = own(*args, **kwargs)
        if pipeline_of(pipe).adds_noise:
            return prepared  # scheduler.add_noise has scaled the noise
        if isinstance(prepared, tuple):  # image to video: latents, then conditions
            return (scheduler.scale_initial_noise(prepared[0]), *prepared[1:])
        scaled = scheduler.scale_initial_noise(prepared)
        return scaled if of_block is None else scaled.to(prepared.dtype)  # its loop gives every state this dtype

    def encode_prompt(self, pipe: DiffusionPipeline, *args, **kwargs):
        """Turn the guidance of a pipeline with sound off, then encode its prompt alone."""
        own = self._replaced.get("encode_prompt") or partial(type(pipe).encode_prompt, pipe)
        if self._classifier_free_guidance or not self.active:
            return own(*args, **kwargs)
        vars(pipe).update(_NO_GUIDANCE)
        call = inspect.signature(own).bind(*args, **kwargs)
        call.arguments["do_classifier_free_guidance"] = False
        return own(*call.args, **call.kwargs)

    def _turn_guidance_off(self, pipe: DiffusionPipeline):
        pipe._guidance_scale = 1.0
        if not self._warned:
            logger.warning(
                "few-step models sample without guidance: guidance_scale is taken as 1. Pass guidance_scale=1.0 to "
                "also save the encoding of the negative prompt, or classifier_free_guidance=True to %s.",
                self.caller,
            )
        self._warned = True
