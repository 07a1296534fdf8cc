"""Attention in the model's dtype, forward and backward, and PyTorch's own (SDPA)."""
