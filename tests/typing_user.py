"""A user's script with the public names, for the type checker (test_typing.py). It is never run.

The two lines with `type: ignore` are wrong. The checker reports an ignored line that has no error.
"""

import torch
from diffusers import WanPipeline

import turbo_rcm_patch as trp


def speed_up(pipe: WanPipeline) -> str:
    patched: trp.Patch = trp.patch(pipe)
    text: str = patched.summary()
    patched.restore()
    with trp.patch(pipe, "quantized") as again:
        text += str(again) if again.active else ""
    configs: list[trp.PatchConfig] = [
        trp.Exact(attention="triton"),
        trp.Quantized(restorable=False, keep=["blocks.0"]),
        trp.Sparse(topk=0.1),
        trp.BlockSparse(mass=0.9),
        trp.PRESETS["exact"],
    ]
    for config in configs:
        trp.patch(pipe, config)
    trp.restore(pipe)
    encoder: trp.TextEncoderPatch = trp.patch_text_encoder(pipe, in_8_bits=True)
    tiny: trp.TinyVae = trp.use_tiny_vae(pipe, "taew2_1.safetensors")
    tiny.restore()
    encoder.restore()
    trp.patch(pipe, 3)  # type: ignore[arg-type]
    trp.patched(pipe)  # type: ignore[attr-defined]
    return text


def sample_in_few_steps(pipe: WanPipeline) -> None:
    handle = trp.use_distilled(pipe, "lora.safetensors", scale=0.5)
    print(handle)
    handle.restore()
    trp.use_distilled(pipe, ("high.safetensors", "low.safetensors"), steps=8)
    recipe: trp.Recipe = trp.RECIPES["lightx2v"]
    trp.use_distilled(pipe, recipe=recipe)
    trp.use_rcm(pipe).restore()
    print(trp.RCMScheduler(), trp.FewStepScheduler)


def load(pipe: WanPipeline) -> list[trp.Patch]:
    left_out: list[str] = trp.merge_turbodiffusion("turbo.pth", "wan.pth", pipe.transformer)
    print(left_out)
    return [trp.load_converted("folder", pipe), trp.load_turbodiffusion("TurboWan.pth", pipe, topk=0.1)]


def fit(pipe: WanPipeline) -> trp.MemoryPlan | None:
    try:
        plan: trp.MemoryPlan = trp.fit(pipe, vram="8 GB", height=480, width=832, num_frames=81)
    except trp.DoesNotFit as error:
        print(error)
        return None
    print(plan, max(plan.peaks.values()) / 1e9)
    return plan


def build() -> WanPipeline:
    attention = trp.FusedRCMAttention(128, 4)
    print(attention, trp.SparseLinearAttention, trp.TorchFusedRCMAttention, trp.TwoPassRCMAttention, trp.PatchError)
    return trp.load_embedded_pipeline(torch.bfloat16, "cuda")
