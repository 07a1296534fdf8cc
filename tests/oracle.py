"""Judge an op: relative L2 error against a higher-precision oracle, with limits derived from dtypes."""

from dataclasses import replace

import torch

from turbo_rcm_patch.tiers import EXACT

# dtypes a device's kernels are tested in. The interpreter's bf16 arithmetic is wrong, so bf16 belongs to the GPU.
DTYPES = {"interpreter": (torch.float32, torch.float16), "cuda": (torch.float32, torch.float16, torch.bfloat16)}


def torch_device(device: str) -> torch.device:
    """The torch device on which the tests' device name runs."""
    return torch.device("cpu" if device == "interpreter" else device)


def relative_error(actual: torch.Tensor, oracle: torch.Tensor) -> float:
    """‖actual − oracle‖ / ‖oracle‖ in fp64, or ‖actual‖ where the oracle is 0. NaN never passes a limit."""
    actual, oracle = actual.detach().double(), oracle.detach().double()
    return ((actual - oracle).norm() / (oracle.norm() if oracle.any() else 1.0)).item()


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """True if each of their tensors equals, bit by bit, ours of the same name.

    Compute a model's ``state_dict()`` once and give it here: it takes milliseconds.
    """
    return all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def assert_no_worse(actual, reference, oracle, *, factor=EXACT.limits.factor):
    """The kernel's error against the oracle is within the exact tier's limits beside the torch reference's own error.

    factor: another one than the tier's, where the test says why.
    """
    limit = replace(EXACT.limits, factor=factor).allowed(relative_error(reference, oracle), actual.dtype)
    error = relative_error(actual, oracle)
    assert error <= limit, f"relative error {error:.3e} > {limit:.3e}"


def combined_weight(weight, dtype=torch.float16):
    """`pair_weight` in plain torch: the weight [N, 4, 9, C] for pairs of frames, of one [N, 3, 3, 3, C]."""
    first, middle, last = weight.flatten(2, 3).unbind(1)
    return torch.stack(((first + middle + last) / 2, (first - middle + last) / 2, first, -last), 1).to(dtype)
