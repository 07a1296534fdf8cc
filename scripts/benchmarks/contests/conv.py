"""The sizes at which the VAE decoder's convolutions are timed."""

from __future__ import annotations

from turbo_rcm_patch.bench.ops import COMPILED, op_case
from turbo_rcm_patch.bench.ops_conv import EAGER, SIZES_5B, SIZES_WAN, conv_skip

CASES = tuple(op_case(conv_skip, *sizes, targets={EAGER: 1.0, COMPILED: 1.0}) for sizes in (*SIZES_WAN, *SIZES_5B))
