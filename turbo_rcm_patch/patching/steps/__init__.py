"""The steps of a block: the plan, and each step in the exact, quantized and sparse tiers."""
