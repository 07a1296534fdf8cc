"""The steps of a block: each launches a kernel, or calls the module, and knows why.

plan.py                 a step, a call and the plans of a block
layers.py               norms and projections; in_8_bits.py has those in 8 bits
attention.py            attention in the model's dtype; in_8_bits.py has that in 8 bits
sparse_linear.py        sparse-linear attention; block_sparse.py has block-sparse attention
residual.py             how the residual is stored between the skips
context_parallel.py     attention over the tokens of several GPUs
"""
