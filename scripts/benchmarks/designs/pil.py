"""Decode and output together, numpy and PIL, exact VAE and tiny VAE, threads 1, 4, 8."""
import statistics, sys, tempfile, time
from pathlib import Path
import torch
sys.path.insert(0, ".")
from diffusers.video_processor import VideoProcessor
from scripts.benchmarks.vae import as_variant, input_of, TINY, PATCHED
from scripts.benchmarks.memory_cap import with_random_weights
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.patching.families.vae import video_output as vo
case = CASES["wan2.1-1.3b"]; dev = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
size = (480, 832, 81) if dev.type == "cuda" else (64, 64, 9)
vae = with_random_weights(lambda: case.vae_class(**case.vae), dev)
if dev.type == "cpu": vae.float()
z = input_of(vae, "decode", size); P = VideoProcessor()
sync = torch.cuda.synchronize if dev.type == "cuda" else (lambda: None)
for variant in (TINY, PATCHED):
    with as_variant(vae, variant) as model, torch.no_grad():
        def run(kind, threads):
            vo.THREADS = threads; sync(); t = time.perf_counter()
            with torch.no_grad(): video = model.decode(z, return_dict=False)[0]
            out = vo.postprocess_video(P, video, kind); return time.perf_counter() - t
        cases = (("np", 4), ("pil", 1), ("pil", 4), ("pil", 8))
        ts = {c: [] for c in cases}
        for c in cases: run(*c)
        for i in range(7):
            for c in (cases if i % 2 else cases[::-1]): ts[c].append(run(*c))
        print(variant, {c: round(statistics.median(v), 4) for c, v in ts.items()}, flush=True)
