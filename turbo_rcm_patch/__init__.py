"""turbo_rcm_patch: fused attention-plus-skip blocks and few-step samplers for Wan pipelines in diffusers.

    import turbo_rcm_patch as trp
    patch = trp.patch(pipe)      # fuse; `patch.restore()` undoes it
    trp.use_rcm(pipe)            # sample in 1-4 steps
    trp.use_distilled(pipe, "lora.safetensors")

Public names are imported on first use; importing the package touches no GPU.
"""

import importlib
from typing import TYPE_CHECKING

_HOME_OF = {
    "patch": "patching",
    "restore": "patching",
    "Patch": "patching",
    "PatchError": "patching",
    "patch_text_encoder": "patching",
    "TextEncoderPatch": "patching",
    "use_distilled": "patching",
    "use_rcm": "patching",
    "use_tiny_vae": "patching",
    "TinyVae": "patching",
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
__version__ = "0.2.0"

if TYPE_CHECKING:  # the same names for type checkers and editors, which do not run __getattr__
    from .config import PRESETS as PRESETS
    from .config import BlockSparse as BlockSparse
    from .config import Exact as Exact
    from .config import PatchConfig as PatchConfig
    from .config import Quantized as Quantized
    from .config import Sparse as Sparse
    from .embedded import load_embedded_pipeline as load_embedded_pipeline
    from .memory import DoesNotFit as DoesNotFit
    from .memory import MemoryPlan as MemoryPlan
    from .memory import fit as fit
    from .modules import FusedRCMAttention as FusedRCMAttention
    from .modules import SparseLinearAttention as SparseLinearAttention
    from .modules import TorchFusedRCMAttention as TorchFusedRCMAttention
    from .modules import TwoPassRCMAttention as TwoPassRCMAttention
    from .patching import Patch as Patch
    from .patching import PatchError as PatchError
    from .patching import TextEncoderPatch as TextEncoderPatch
    from .patching import TinyVae as TinyVae
    from .patching import load_converted as load_converted
    from .patching import load_turbodiffusion as load_turbodiffusion
    from .patching import merge_turbodiffusion as merge_turbodiffusion
    from .patching import patch as patch
    from .patching import patch_text_encoder as patch_text_encoder
    from .patching import restore as restore
    from .patching import use_distilled as use_distilled
    from .patching import use_rcm as use_rcm
    from .patching import use_tiny_vae as use_tiny_vae
    from .recipes import RECIPES as RECIPES
    from .recipes import Recipe as Recipe
    from .scheduler import FewStepScheduler as FewStepScheduler
    from .scheduler import RCMScheduler as RCMScheduler
else:

    def __getattr__(name: str):
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
