"""Few-step sampling on a pipeline: the samplers, their handle, and which step is under way."""
