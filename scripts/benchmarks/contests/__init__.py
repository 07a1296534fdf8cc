"""Contests that `turbo-rcm tune` does not time, and all cases of scripts/benchmarks/ops.py."""
