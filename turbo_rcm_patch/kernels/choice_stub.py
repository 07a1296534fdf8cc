import torch
from . import attention_hopper, gemm_hopper, reference
from .dispatch import is_hopper
def why_torch(op, device, dtype):
    if device.type != "cuda": return None
    return None if is_hopper(device) and dtype != torch.float32 else "not measured"
def why_sdpa(device, dtype, head_dim, with_residual=False, with_backward=False):
    from .attention import sdpa_is_faster
    return "PyTorch's is faster" if sdpa_is_faster(device, dtype, head_dim, with_residual=with_residual, with_backward=with_backward) else None
def attention_kernel_name(implementation, device, dtype, head_dim, with_residual=False, with_backward=False):
    if implementation == "torch": return "PyTorch SDPA"
    return "portable Triton" if with_residual or attention_hopper.why_not_on(device, dtype, head_dim) else "sm_90 Gluon"
def gemm_kernel(device, dtype, M, N, K):
    return "portable Triton" if gemm_hopper.why_not_on(device, dtype) else "sm_90 Gluon"
def linear_qkv_kernel(device, dtype, M, N, K):
    r = gemm_hopper.why_not_on(device, dtype)
    return ("PyTorch linear", r) if r else ("sm_90 Gluon", None)
def gelu(x, *, implementation="auto"):
    return torch.nn.functional.gelu(x, approximate="tanh")
