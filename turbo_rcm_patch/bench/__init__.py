"""Measuring a pipeline: stage timings, comparison with the unpatched model, per-layer verification. And the attention
modules against each other: `benchmark_all_implementations`, imported on first use."""

__all__ = ["benchmark_all_implementations"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .implementations import benchmark_all_implementations

    return benchmark_all_implementations
