"""Measuring a pipeline: stage timings, comparison with the unpatched model, per-layer verification."""
