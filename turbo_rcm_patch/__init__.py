"""turbo_rcm_patch: fused attention-plus-skip blocks and few-step samplers for Wan pipelines in diffusers.

    import turbo_rcm_patch as trp
    patch = trp.patch(pipe)      # fuse; `patch.restore()` undoes it
    trp.use_rcm(pipe)            # sample in 1-4 steps
    trp.use_distilled(pipe, "lora.safetensors")

Public names are imported on first use; importing the package touches no GPU.
"""

import importlib

_HOME_OF = {
    "patch": "patching",
    "restore": "patching",
    "Patch": "patching",
    "PatchError": "patching",
    "patch_text_encoder": "patching",
    "TextEncoderPatch": "patching",
    "use_distilled": "patching",
    "use_rcm": "patching",
    "load_converted": "patching",
    "load_turbodiffusion": "patching",
    "merge_turbodiffusion": "patching",
    "fit": "memory",
    "DoesNotFit": "memory",
    "MemoryPlan": "memory",
    "PatchConfig": "config",
    "Exact": "config",
    "Quantized": "config",
    "Sparse": "config",
    "BlockSparse": "config",
    "PRESETS": "config",
    "Recipe": "recipes",
    "RECIPES": "recipes",
    "FewStepScheduler": "scheduler",
    "RCMScheduler": "scheduler",
    "FusedRCMAttention": "modules",
    "SparseLinearAttention": "modules",
    "TorchFusedRCMAttention": "modules",
    "TwoPassRCMAttention": "modules",
    "load_embedded_pipeline": "embedded",
}

__all__ = sorted(_HOME_OF)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_HOME_OF])
