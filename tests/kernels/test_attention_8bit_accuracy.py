"""8-bit attention of what the tiny model attends to, and of structured values, beside FlashAttention-3's in fp8."""

import pytest
import torch
from diffusers.models.transformers import transformer_wan

from tests.kernels.test_attention_8bit import oracle
from tests.oracle import relative_error, torch_device
from turbo_rcm_patch import embedded
from turbo_rcm_patch.kernels.attention_8bit import attention_8bit
from turbo_rcm_patch.kernels.quantize_qkv import quantize_qkv
from turbo_rcm_patch.patching import use_rcm

SIZE = {"height": embedded.HEIGHT, "width": embedded.WIDTH, "num_frames": embedded.FRAMES}


@pytest.fixture(scope="module")
def captured():
    """q, k and v [B, S, H, D] of every self-attention of the tiny model in a generation of 4 steps."""
    pipe, found = embedded.load_embedded_pipeline(torch.float32), []
    use_rcm(pipe)
    pipe.set_progress_bar_config(disable=True)
    attend = transformer_wan.dispatch_attention_fn

    def watched(q, k, v, **options):
        if q.shape[1] == k.shape[1]:
            found.append((q, k, v))
        return attend(q, k, v, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_wan, "dispatch_attention_fn", watched)
        generator = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 4, "guidance_scale": 1.0, "output_type": "latent", "generator": generator}
        pipe("a red circle moves right", **SIZE, **options)
    assert len(found) == 4 * len(pipe.transformer.blocks)
    return found


def structured(tokens, heads, head_dim):
    """Tokens AR(1) with ρ = 0.95; k with a channel mean of 3 N(0, 1) and 4 channels ×5; v with 2 channels ×8."""
    steps = torch.randn(tokens, 3, heads, head_dim)
    x = [steps[0]]
    for step in steps[1:]:
        x.append(0.95 * x[-1] + (1 - 0.95**2) ** 0.5 * step)
    q, k, v = torch.stack(x, 1)
    for head in range(heads):
        k[:, head, torch.randperm(head_dim)[:4]] *= 5
        v[:, head, torch.randperm(head_dim)[:2]] *= 8
    return [y.flatten(1)[None] for y in (q, k + 3 * torch.randn(heads, head_dim), v)]


def flash_attention_in_fp8(q, k, v):
    """As FlashAttention-3 with unit scales: q, k, v and the softmax's weights, before they are divided, in e4m3."""
    q, k, v = (_in_e4m3(x).transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (_in_e4m3(weights) @ v / weights.sum(-1, keepdim=True)).transpose(1, 2)


def _in_e4m3(x):
    return x.to(torch.float8_e4m3fn).float()


def assert_accurate(q, k, v):
    """q, k, v: [B, S, H, D]."""
    heads = q.shape[2]
    flat = [x.flatten(2) for x in (q, k, v)]
    exact = oracle(*flat, heads)
    ours = attention_8bit(quantize_qkv(*flat, heads=heads)).double()
    assert torch.nn.functional.cosine_similarity(ours.flatten(), exact.flatten(), 0) >= 0.9995
    assert (ours - exact).abs().sum() <= 0.03 * exact.abs().sum()
    assert relative_error(ours, exact) <= 0.5 * relative_error(flash_attention_in_fp8(q, k, v), exact)


def on(device, tensors):
    """In bf16 on a GPU, which takes the kernel; the CPU takes the reference."""
    return [x.to(torch_device(device), torch.bfloat16 if device == "cuda" else torch.float32) for x in tensors]


def test_what_the_tiny_model_attends_to(captured, device):
    for qkv in captured:
        assert_accurate(*on(device, qkv))


def test_structured_values(device):
    qkv = structured(1024, 2, 128)
    assert_accurate(*(x.unflatten(2, (2, 128)) for x in on(device, qkv)))
