"""Fit a pipeline into a GPU's memory: where each model lies, with diffusers' own offloading.

plan.py            `fit`, and the plan that it returns
checks.py          bad input of `fit`
host.py            the host's memory that a plan takes
components.py      the bytes of models
stages.py          the bytes that a stage of a generation computes with
sound.py           the stages of LTX-2; traced.py counts the tensors of diffusers' own code for them
choose.py          which models stay on the GPU, and which stream
streaming.py       diffusers' group offloading for the blocks of a model
pinned.py          pinned memory for these blocks
empty_models.py    models without weights, from configs
needs.py           what such a model takes in each tier
"""

from .host import DoesNotFit
from .plan import MemoryPlan, fit, fit_with

__all__ = ["DoesNotFit", "MemoryPlan", "fit", "fit_with"]
