"""The sizes at which the VAE decoder's convolutions are timed."""

from __future__ import annotations

from turbo_rcm_patch.bench.ops import COMPILED, op_case
from turbo_rcm_patch.bench.ops_conv import EAGER, conv_skip
from turbo_rcm_patch.patching.families.vae.sizes import CONVOLUTIONS_5B, CONVOLUTIONS_WAN

_SIZES = (*CONVOLUTIONS_WAN, *CONVOLUTIONS_5B)
CASES = tuple(op_case(conv_skip, *sizes, targets={EAGER: 1.0, COMPILED: 1.0}) for sizes in _SIZES)
