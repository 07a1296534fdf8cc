"""All of it in a minute, without a GPU too: the skip in the projection's epilogue, and a pipeline patched with it.

python examples/demo.py    # writes demo.png, frames of a video
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

from PIL import Image

from turbo_rcm_patch.cli.quiet_imports import quiet_imports

with quiet_imports():  # other packages warn while they are imported
    import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    if version("triton").startswith("3.6.") and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
        sys.exit(f'Triton 3.6 cannot interpret kernels with numpy {version("numpy")}: pip install "numpy<2.4"')
    os.environ["TRITON_INTERPRET"] = "1"  # the kernels then run in Triton's interpreter; set before the import

with quiet_imports():
    import turbo_rcm_patch as trp

print("1. c_skip(t) · x + c_out(t) · proj(attention(qkv(x))), in three forms with the same weights")
forms = {  # by the names of scripts/benchmarks/profile_hbm.py
    "two_pass": ("the skip as a pass of its own", trp.TwoPassRCMAttention(64, 2)),
    "torch_fused": ("written out in plain torch", trp.TorchFusedRCMAttention(64, 2)),
    "triton_fused": ("the skip in the projection's epilogue", trp.FusedRCMAttention(64, 2, implementation="triton")),
}
x, timestep = torch.randn(2, 40, 64, device=device), torch.tensor([0.3, 0.8], device=device)
computed, weights = [], forms["two_pass"][1].state_dict()
for form, module in forms.values():
    module.to(device).load_state_dict(weights)
    output = module(x, timestep)
    output.square().sum().backward()
    computed.append((output, module.qkv.weight.grad))
    apart = [
        ((mine - first).norm() / first.norm()).item() for mine, first in zip(computed[-1], computed[0], strict=True)
    ]
    assert torch.equal(module(x, 0.0), x)  # at t = 0 the skip is all there is
    print(f"   {form:37}  output {apart[0]:.0e} and gradient {apart[1]:.0e} from the first; at t = 0 x itself")

print("2. bytes that each moves on an H200, bf16, 65536 tokens of 512 channels, measured by Nsight Compute")
results = json.loads((Path(__file__).resolve().parent.parent / "results/nvidia-h200.json").read_text())
traffic = results["runs"]["traffic-attention"]["implementations"]
moved = {one["name"]: (one["read"] + one["written"]) / 1e6 for one in traffic}
for name, (form, _) in forms.items():
    print(f"   {form:37} {moved[name]:5.0f} MB")

print("3. a tiny Wan pipeline, patched")
pipe = trp.load_embedded_pipeline(device=device)
trp.use_rcm(pipe)
print(trp.patch(pipe))
generator = torch.Generator(device).manual_seed(0)
prompt = "a large red circle moves up slowly while a small blue square moves left, on white"
size = {"height": 160, "width": 224, "num_frames": 17}
frames = pipe(prompt, **size, num_inference_steps=2, guidance_scale=1.0, generator=generator, output_type="pil").frames[
    0
]
strip = Image.new("RGB", (5 * frames[0].width, frames[0].height))
for place, frame in enumerate(frames[::4]):
    strip.paste(frame, (place * frame.width, 0))
strip.save("demo.png")
print("wrote demo.png")
