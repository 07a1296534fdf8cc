"""Fit a pipeline into a GPU's memory: where each model lies, with diffusers' own offloading.

plan.py: `fit` and the plan that it returns. amounts.py: "8 GB" as bytes, and back. components.py: the bytes of models.
stages.py: the bytes that a stage of a generation computes with. choose.py: which models stay on the GPU and which
stream. streaming.py: diffusers' group offloading for the blocks of a model.
"""

from .plan import DoesNotFit, MemoryPlan, fit

__all__ = ["DoesNotFit", "MemoryPlan", "fit"]
