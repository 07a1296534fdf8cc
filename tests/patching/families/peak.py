"""The peak memory of a VAE as on a GPU, without one: bytes of tensors on the meta device that live together."""

import weakref
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from turbo_rcm_patch.kernels.choice.registry import Kernel, Op
from turbo_rcm_patch.kernels.conv import conv_pairs_sm90, conv_sm90
from turbo_rcm_patch.kernels.conv.conv_pytorch import convolve
from turbo_rcm_patch.kernels.conv.conv_skip import result_shape
from turbo_rcm_patch.patching.families.vae import steps

LAYOUTS = {}  # by op and arguments, the layout of the new tensor that it returns; PyTorch takes longer to calculate it


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that ops made and that live together, without a model's weights and their views."""

    def __init__(self, model):
        super().__init__()
        self.bytes = self.alive = 0
        self._seen = {weight.untyped_storage()._cdata for weight in model.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = self._result(function, args, kwargs or {})
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                self._count(result.untyped_storage())
        return results

    def take(self, size):
        """Count bytes beside what lives now."""
        self.bytes = max(self.bytes, self.alive + size)

    def _result(self, function, args, kwargs):
        """Return an op's result. A new tensor of known layout is made without the op."""
        key = function, key_of(args), tuple(kwargs.items())
        if key in LAYOUTS:
            shape, stride, dtype = LAYOUTS[key]
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        result = function(*args, **kwargs)
        is_new = isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in self._seen
        if is_new and all(returned.alias_info is None for returned in function._schema.returns):
            LAYOUTS[key] = result.shape, result.stride(), result.dtype
        return result

    def _count(self, storage):
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.alive += storage.nbytes()
            self.take(0)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, address, size):
        self._seen.discard(address)
        self.alive -= size


def key_of(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(key_of, value)) if isinstance(value, (tuple, list)) else value


NORM = Op("rms_norm_silu", (Kernel("one kernel", lambda _: None, lambda x, weight, silu: x.new_empty(x.shape)),))


def convolved(x, weight, bias, residual, front, upsample, interleave):
    return x.new_empty(result_shape(x, weight, front, upsample, interleave))


def planes_of(x, weight, front):
    B, T, H, W, C = x.shape
    return x.new_empty((B, (T + 1) // 2, 4, H, W, C), dtype=torch.float16)


def convolved_in_pairs(planes, weight, bias, residual, frames, dtype):
    B, pairs, _, H, W, _ = planes.shape
    return planes.new_empty((B, 2 * pairs, H, W, len(weight)), dtype=dtype)[:, :frames]


def why_not_in_pairs(spec):
    """Return what the kernel for sm_90 says on a GPU with few multiprocessors."""
    few = mock.patch.multiple(conv_pairs_sm90, device_properties=lambda _: ((9, 0), 1), HAS_WIDE=True)
    with mock.patch.object(conv_sm90, "why_not_on", return_value=None), few:
        return conv_pairs_sm90.why_not(spec.device, spec.dtype, spec.shape, spec.weight_shape)


NORM_OF_PAIRS = Op("rms_norm_silu_pairs", (Kernel("one kernel", lambda _: None, planes_of),))
NOT_FUSED = Kernel("not fused", lambda _: None, None, is_fused=False)
PAIRS_OF_FRAMES = Op("conv_pairs", (Kernel("one kernel", why_not_in_pairs, convolved_in_pairs), NOT_FUSED))
CONVOLUTION = Op("conv_skip", (Kernel("one kernel", lambda _: None, convolved),))


PYTORCHS_CONVOLUTION = Op("conv_skip", (Kernel("PyTorch's", lambda _: None, convolve, is_fused=False),))
PYTORCHS_NORM = steps.RMS_NORM_SILU  # as it runs on tensors without values


@contextmanager
def as_on_a_gpu(vae, convolution=CONVOLUTION, norm=NORM):
    """Count the bytes of a run with PyTorch's fused attention, and by default our convolutions and norms on sm_90."""
    fused = mock.patch.object(F, "scaled_dot_product_attention", lambda q, k, v, **_: torch.empty_like(q))
    norm = mock.patch.object(steps, "RMS_NORM_SILU", norm)
    pairs = mock.patch.multiple(steps, RMS_NORM_SILU_PAIRS=NORM_OF_PAIRS, CONV_PAIRS=PAIRS_OF_FRAMES)
    if convolution is PYTORCHS_CONVOLUTION:
        pairs = nullcontext()
    convolution = mock.patch.object(steps.kernels, "CONV_SKIP", convolution)
    with torch.no_grad(), fused, norm, pairs, convolution, Peak(vae) as counted:
        yield counted
