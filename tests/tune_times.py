"""Small shapes for `turbo-rcm tune`, and times without a GPU to measure them on."""

from turbo_rcm_patch.bench.ops import OpKey, OpResult, Timing
from turbo_rcm_patch.bench.tune import OPS, Shapes
from turbo_rcm_patch.patching.families.wan.sizes import ops

CONVOLUTION = (2, 3, 4, 8, 8, 3, 3, 1, 1)


def small_shapes(head_dim=64, tokens=70, convolutions=(CONVOLUTION,)):
    config = {"num_attention_heads": 2, "attention_head_dim": head_dim, "ffn_dim": 40}
    convs = [OpKey("conv_skip", sizes) for sizes in convolutions]
    return Shapes("small", "32x48x5", [*(OpKey(*op) for op in ops(config, tokens)), *convs])


def timed(backends=(), kernels=(), **ours):
    """Return a measurement of a case: ours by op (default 2 ms), and 3 ms for what runs otherwise.

    backends: of PyTorch's attention, by case, as (name, milliseconds).
    kernels: by op, the name and milliseconds of a kernel that only tune may choose.
    """

    def measure(case):
        op = case.key.op
        time = ours.get(op, 2.0)
        timings = {"ours": Timing(True, 1e-3, time)}
        if OPS[op].exact is None:
            timings[OPS[op].rival] = Timing(False, 1e-3, 3.0)
        timings |= {f"PyTorch SDPA ({name})": Timing(False, 1e-3, ms) for name, ms in dict(backends).get(case.name, ())}
        timings |= {name: Timing(False, 1e-3, ms) for name, ms in dict(kernels).get(op, ())}
        return OpResult(case.name, timings, None if time is None else "ours")

    return measure
