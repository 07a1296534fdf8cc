"""Measure a pipeline: stage timings, comparison with the unpatched model, checks per layer, tuning for a GPU."""
