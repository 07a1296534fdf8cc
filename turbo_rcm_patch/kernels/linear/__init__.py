"""Linears in one GEMM with what follows them: the skip, GELU, or the three projections of Q, K and V."""
