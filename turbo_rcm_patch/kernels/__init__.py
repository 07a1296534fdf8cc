"""The fused ops. Each file: formula, Triton kernel, launcher, custom op with fake, and the function exported here.

Every op except ``quantize_weight`` takes ``implementation="auto" | "triton" | "torch"``; see dispatch.py for what
"auto" means.

Add a kernel to an op in five steps:

1. Write a file beside the op's others: the jit function, its launcher, and ``why_not(spec)``, which returns the reason
   why the kernel cannot run, or None.
2. Give the launcher the arguments of the op's other launchers. It hands unaligned operands to the next kernel.
3. Put a ``Kernel(name, why_not, op.launch(name, launcher))`` into the op's list, such as LINEAR_SKIP in
   linear/linear_skip.py. The first kernel of the list that can run is picked (choice/registry.py).
   With ``by_tune=True`` it runs only on a GPU where `turbo-rcm tune` found it the fastest, as in linear/gemm_sm89.py.
4. Add a row for each GPU to the table of picks, such as tests/kernels/linear/test_picks.py.
5. Compare it with the reference in the op's tests, then time it.
"""

from ..config import IMPLEMENTATIONS
from .attention.attention import (
    ATTENTION,
    ATTENTION_TO_E4M3,
    AttentionSpec,
    attention,
    attention_label,
    attention_to_e4m3,
)
from .attention_8bit.attention_8bit import ATTENTION_8BIT, attention_8bit
from .attention_8bit.quantize_qkv import QUANTIZE_QKV, QuantizedQKV, quantize_qkv
from .attention_8bit.spec import HEAD_DIMS as HEAD_DIMS_8BIT
from .attention_8bit.spec import Attention8BitSpec, default_v_format
from .block_sparse.block_sparse_attention import (
    BLOCK_SPARSE_ATTENTION,
    BLOCK_SPARSE_ATTENTION_8BIT,
    block_sparse_attention,
    block_sparse_attention_8bit,
    block_sparse_sizes,
    kept_share,
)
from .choice.measured import measured_on, tuned_sdpa, tuned_tiers, why_torch
from .choice.registry import Op, Pick
from .coefficient import MAX_RUNS, Runs
from .conv.conv_skip import CONV_SKIP, ConvSpec, conv_skip
from .dispatch import interpreting, why_not_triton_on
from .launch import compile_ahead
from .linear.linear import linear_8bit, linear_low_rank
from .linear.linear_gelu import linear_gelu
from .linear.linear_qkv import linear_qkv
from .linear.linear_skip import linear_skip
from .linear.low_rank import RANK_STEP, LowRank
from .quantized import FP8, INT8, Quantized, QuantizedWeight, quantize_weight
from .rows.gelu import gelu
from .rows.layer_norm_modulate import layer_norm_modulate
from .rows.quantize_rows import quantize_rows
from .rows.rms_norm_rope import rms_norm_rope
from .rows.rms_norm_silu import rms_norm_silu
from .rows.skip import skip
from .saturation import Saturation
from .sparse_linear.sparse_linear_attention import (
    SPARSE_LINEAR_ATTENTION,
    SparseSpec,
    check_sparsity,
    chosen_key_blocks,
    sparse_block_sizes,
    sparse_linear_attention,
)
from .sparse_linear.sparse_linear_reference import KeptBlocks, kept_blocks, sparse_block_map

__all__ = [
    "ATTENTION",
    "ATTENTION_8BIT",
    "ATTENTION_TO_E4M3",
    "BLOCK_SPARSE_ATTENTION",
    "BLOCK_SPARSE_ATTENTION_8BIT",
    "CONV_SKIP",
    "FP8",
    "HEAD_DIMS_8BIT",
    "IMPLEMENTATIONS",
    "INT8",
    "MAX_RUNS",
    "QUANTIZE_QKV",
    "RANK_STEP",
    "SPARSE_LINEAR_ATTENTION",
    "Attention8BitSpec",
    "AttentionSpec",
    "ConvSpec",
    "KeptBlocks",
    "LowRank",
    "Op",
    "Pick",
    "Quantized",
    "QuantizedQKV",
    "QuantizedWeight",
    "Runs",
    "Saturation",
    "SparseSpec",
    "attention",
    "attention_8bit",
    "attention_label",
    "attention_to_e4m3",
    "block_sparse_attention",
    "block_sparse_attention_8bit",
    "block_sparse_sizes",
    "check_sparsity",
    "chosen_key_blocks",
    "compile_ahead",
    "conv_skip",
    "default_v_format",
    "gelu",
    "interpreting",
    "kept_blocks",
    "kept_share",
    "layer_norm_modulate",
    "linear_8bit",
    "linear_gelu",
    "linear_low_rank",
    "linear_qkv",
    "linear_skip",
    "measured_on",
    "quantize_qkv",
    "quantize_rows",
    "quantize_weight",
    "rms_norm_rope",
    "rms_norm_silu",
    "skip",
    "sparse_block_map",
    "sparse_block_sizes",
    "sparse_linear_attention",
    "tuned_sdpa",
    "tuned_tiers",
    "why_not_triton_on",
    "why_torch",
]
