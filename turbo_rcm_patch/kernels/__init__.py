"""The fused ops. Each file: formula, Triton kernel, launcher, custom op with fake, and the function exported here.

Every exported function takes ``implementation="auto" | "triton" | "torch"``; see dispatch.py for what "auto" means.
"""

from .attention import attention, sdpa_is_faster
from .coefficient import MAX_RUNS, Runs
from .dispatch import IMPLEMENTATIONS, interpreting, why_not_triton, why_not_triton_on
from .fingerprint import fingerprint
from .launch import compile_ahead
from .layer_norm_modulate import layer_norm_modulate
from .linear_gelu import linear_gelu
from .linear_qkv import linear_qkv
from .linear_skip import linear_skip
from .rms_norm_rope import rms_norm_rope
from .saturation import reset as reset_saturated
from .saturation import saturated
from .skip import skip

__all__ = [
    "IMPLEMENTATIONS",
    "MAX_RUNS",
    "Runs",
    "attention",
    "compile_ahead",
    "fingerprint",
    "interpreting",
    "layer_norm_modulate",
    "linear_gelu",
    "linear_qkv",
    "linear_skip",
    "reset_saturated",
    "rms_norm_rope",
    "saturated",
    "sdpa_is_faster",
    "skip",
    "why_not_triton",
    "why_not_triton_on",
]
