"""RMSNorm and SiLU as the planes of pairs of frames, against the norm's own oracle."""

import pytest
import torch

from tests.oracle import DTYPES, assert_no_worse, torch_device
from turbo_rcm_patch.kernels import reference
from turbo_rcm_patch.kernels.rows.rms_norm_silu_pairs import RMS_NORM_SILU_PAIRS, rms_norm_silu_pairs_reference

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

# (B, T, H, W, C)
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 2, 5, 3), (1, 2, 7, 3, 100), (2, 4, 3, 3, 192), (1, 5, 2, 5, 1024)]
LAUNCH = RMS_NORM_SILU_PAIRS.kernels[0].launch


def planes_of(frames):
    """Return the planes of normed frames that begin with the two before, in fp64."""
    if frames.shape[1] % 2:
        frames = torch.cat((frames, torch.zeros_like(frames[:, :1])), 1)
    pairs = range(0, frames.shape[1] - 2, 2)
    planes = []
    for d0, d1, d2, d3 in (frames[:, t : t + 4].unbind(1) for t in pairs):
        planes.append(torch.stack((d1 + d2, d2 - d1, d0 - d2, d1 - d3), 1))
    return torch.stack(planes, 1)


def check(x, weight, front, compute):
    exact = torch.cat((front.double(), reference.rms_norm_silu(x.double(), weight.double(), True)), 1)
    kept = front.clone()
    planes = compute(x, weight, kept)
    B, T, *rest = x.shape
    assert (planes.dtype, planes.shape) == (torch.float16, (B, (T + 1) // 2, 4, *rest))
    assert planes.is_contiguous()
    assert_no_worse(planes, planes_of(exact).half(), planes_of(exact))
    assert kept.dtype == x.dtype
    assert_no_worse(kept, exact[:, -2:].to(x.dtype), exact[:, -2:])


@pytest.mark.parametrize("compute", [LAUNCH, rms_norm_silu_pairs_reference])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape, compute, device):
    for dtype in DTYPES[device]:
        x, front = (3 * torch.randn(shape[0], frames, *shape[2:]) for frames in (shape[1], 2))
        x, front, weight = (tensor.to(torch_device(device), dtype) for tensor in (x, front, torch.randn(shape[-1])))
        check(x, weight, front, compute)


def test_an_odd_number_of_frames_of_pairs(device):
    """A convolution's result for two samples, which lacks the last frame of its memory."""
    x, front, weight = (
        torch.randn(*shape, device=torch_device(device)) for shape in ((2, 4, 2, 3, 8), (2, 2, 2, 3, 8), (8,))
    )
    check(x[:, :3], weight, front, LAUNCH)


def test_chunks_are_the_video(device):
    """Chunks of any size go on from the frames that the chunk before has left."""
    device = torch_device(device)
    x, front = (torch.randn(1, frames, 3, 5, 24, device=device) for frames in (9, 2))
    weight, kept = torch.randn(24, device=device), front.clone()
    normed = torch.cat((front, reference.rms_norm_silu(x, weight, True)), 1)
    begin = 0
    for frames in (1, 2, 4, 1, 1):
        planes = LAUNCH(x[:, begin : begin + frames], weight, kept)
        torch.testing.assert_close(
            planes, planes_of(normed[:, begin : begin + 2 + frames]).half(), rtol=2e-3, atol=2e-3
        )
        begin += frames
    torch.testing.assert_close(kept, normed[:, -2:], rtol=1e-5, atol=1e-6)
