"""Patch a pipeline you already have, look at what was fused, take the patch off again.

The patch changes neither the scheduler nor the call: put your own pipeline and your own arguments here.
"""

import torch

import turbo_rcm_patch as trp

pipe = trp.load_embedded_pipeline()  # or your WanPipeline.from_pretrained(...)
trp.use_rcm(pipe)  # leave this out to keep your own scheduler


def generate():
    return pipe(
        "a red circle moves right",
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=torch.Generator(pipe.device).manual_seed(0),
        output_type="pt",
    ).frames


unpatched = generate()

patch = trp.patch(pipe)
print(patch.summary())
patched = generate()
patch.restore()

with trp.patch(pipe, trp.Exact(fuse=["feed_forward"])):  # restored at the end of the block
    partly_patched = generate()

print("largest difference of a pixel, patched:", (patched - unpatched).abs().max().item())
print("largest difference of a pixel, only the feed-forward patched:", (partly_patched - unpatched).abs().max().item())
print("bitwise the same after restore:", torch.equal(generate(), unpatched))
