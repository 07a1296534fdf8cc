"""Contests that `turbo-rcm tune` does not hold, and the cases of all that scripts/benchmarks/ops.py times."""
