"""Patch a pipeline you already have, look at what was fused, take the patch off again.

The patch changes neither the scheduler nor the call: put your own pipeline and your own arguments here.
"""

from turbo_rcm_patch.cli.quiet_imports import quiet_imports

with quiet_imports():  # other packages warn while they are imported
    import torch

    from turbo_rcm_patch import Exact, load_embedded_pipeline, patch, use_rcm

device = "cuda" if torch.cuda.is_available() else "cpu"
pipe = load_embedded_pipeline(device=device)  # or your WanPipeline.from_pretrained(...).to(device)
use_rcm(pipe)  # leave this out to keep your own scheduler


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

applied = patch(pipe)
print(applied.summary())
patched = generate()
applied.restore()

with patch(pipe, Exact(fuse=["feed_forward"])):  # restored at the end of the block
    partly_patched = generate()

print("largest difference of a pixel, patched:", (patched - unpatched).abs().max().item())
print("largest difference of a pixel, only the feed-forward patched:", (partly_patched - unpatched).abs().max().item())
print("bitwise the same after restore:", torch.equal(generate(), unpatched))
