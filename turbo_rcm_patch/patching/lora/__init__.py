"""LoRA files and layers: loading them, and computing them inside the fused projections."""
