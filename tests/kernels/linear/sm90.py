"""The reason why the GEMM for sm_90 does not take some operands, for the tests of linears."""

from turbo_rcm_patch.kernels.coefficient import coefficient_kind
from turbo_rcm_patch.kernels.linear import gemm_sm90
from turbo_rcm_patch.kernels.linear.gemm_portable import NO_PAIR
from turbo_rcm_patch.kernels.linear.spec import spec_of

UNALIGNED = "unaligned"


def why_not(a, *weights, samples=1, residual=None, c_skip=None, c_out=None, starts=None, dtype=None, second=NO_PAIR):
    """The reason why the kernel does not run for an a [rows, K] and weights [N, K], which may be UNALIGNED."""
    spec = spec_of(
        "linear_skip",
        "auto",
        a,
        *weights,
        result=dtype or a.dtype,
        second=second,
        weights=len(weights),
        samples=samples,
        residual=None if residual is None else residual.dtype,
        c_skip=coefficient_kind(c_skip),
        c_out=coefficient_kind(c_out, starts),
    )
    reason = gemm_sm90.why_not(spec)
    if reason is None and not gemm_sm90.fits_tma(a, *weights, *second, residual):
        return UNALIGNED
    return reason
