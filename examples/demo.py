"""All of it in a minute, without a GPU too: the skip in the projection's epilogue, and a pipeline patched with it.

python examples/demo.py    # writes demo.png, frames of a video
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # the kernels then run in Triton's interpreter; set before the import

import turbo_rcm_patch as trp  # noqa: E402

print("1. c_skip(t) · x + c_out(t) · proj(attention(qkv(x))), three ways with the same weights")
options = {
    trp.TwoPassRCMAttention: {},
    trp.TorchFusedRCMAttention: {},
    trp.FusedRCMAttention: {"implementation": "triton"},
}
modules = [module(64, 2, **more).to(device) for module, more in options.items()]
x, timestep = torch.randn(2, 40, 64, device=device), torch.tensor([0.3, 0.8], device=device)
results = []
for module in modules:
    module.load_state_dict(modules[0].state_dict())
    output = module(x, timestep)
    output.square().sum().backward()
    results.append((output, module.qkv.weight.grad))
    apart = [((mine - first).norm() / first.norm()).item() for mine, first in zip(results[-1], results[0], strict=True)]
    assert torch.equal(module(x, 0.0), x)  # at t = 0 the skip is all there is
    print(f"   {type(module).__name__:22} output {apart[0]:.0e} and gradient {apart[1]:.0e} apart; x itself at t = 0")

print("2. its memory traffic, bf16, 65536 tokens of 512 channels")
with tempfile.TemporaryDirectory() as folder:
    report, script = Path(folder) / "traffic.json", Path(__file__).parent.parent / "scripts/profile_hbm.py"
    subprocess.run([sys.executable, script, "--json", report], check=True, stdout=subprocess.DEVNULL)
    traffic = json.loads(report.read_text())
for one in traffic["implementations"]:
    print(f"   {one['name']:22} {(one['read'] + one['written']) / 1e6:6.0f} MB")
print(
    {"counters": "   measured by Nsight Compute", "shapes": "   counted from shapes, not measured"}[traffic["source"]]
)

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
