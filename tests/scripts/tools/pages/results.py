"""Results of runs, as the results files hold them."""

from turbo_rcm_patch.bench.ops_quantized import OURS_EXACT
from turbo_rcm_patch.bench.ops_sparse import DENSE


def gpu_tests_entry():
    environment = {"torch": "2.11", "triton": "3.6", "diffusers": "0.42", "commit": "0123456789abcdef"}
    return {"ok": True, "passed": 71, "environment": environment}


def step_run(name, compiled, patched, errors=(None, None, None)):
    def variant(name, step, error):
        timings = {"steps": [step, step], "peak_memory": 2**30}
        return {"name": name, "timings": timings, "latents": None, "step_error": error}

    names, steps = ("unpatched", "torch.compile", "patched"), (0.9, compiled, patched)
    variants = [variant(*each) for each in zip(names, steps, errors, strict=True)]
    settings = {"config": name, "num_frames": 5, "height": 16, "width": 32}
    environment = {"gpu": "GPU X", "torch": "2", "triton": "3", "diffusers": "0"}
    return {"settings": settings, "variants": variants, "environment": environment}


def _judged(variant, steps, share, psnr, **more):
    accuracy = {"overall": {"share": share, "standard_error": 0.0123}}
    return {"variant": variant, "steps": steps, "accuracy": accuracy, "psnr_to_exact": psnr, **more}


def evaluation(n=77):
    rows = [("unpatched", 1, 0.9, 40.0), ("exact", 1, 0.91, None), ("quantized", 1, 0.89, 38.125)]
    rows += [("unpatched", 4, 0.98, 41.0), ("exact", 4, 0.99, None), ("quantized", 4, 0.97, 44.5)]
    rows.append(("unpatched fp32", 4, 0.96, 45.0))
    results = [_judged(*row) for row in rows]
    return {"settings": {"n": n}, "environment": {"gpu": "GPU X"}, "results": results}


def judged_sparse(n=24):
    rows = [_judged("exact", 1, 0.9, None, kept=None), _judged("block sparse", 1, 0.6, 19.0, kept=0.3)]
    rows += [_judged("SLA", 1, 0.5, 20.0, kept=0.1), _judged("SLA", 4, 0.75, 21.0, kept=0.1)]
    rows.append(_judged("SLA", 4, 0.85, 22.0, kept=0.2))
    return {"settings": {"n": n}, "environment": {"gpu": None}, "results": rows}


def judged_block_sparse(n=6):
    variants = [_judged("mass 0.9", 4, 0.8, 22.25), _judged("mass 0.9, first step exact", 4, 0.9, 30.0)]
    exact = _judged("exact", 4, 1.0, None)
    return {"settings": {"n": n}, "environment": {"gpu": None}, "exact": exact, "variants": variants}


def attention_rows(sizes="12×32760×128"):
    def row(case, best, **milliseconds):
        timings = {name.replace("_", " "): {"milliseconds": time} for name, time in milliseconds.items()}
        return {"case": f"{case} {sizes}", "best": best, "timings": timings, "targets": {}, "speedups": {}}

    sparse = row("norms_sparse_linear_attention", "ours", ours=1.5)
    sparse["timings"][DENSE] = {"milliseconds": 7.125}
    quantized = row("norms_attention_8bit", "ours", ours=7.75)
    quantized["timings"][OURS_EXACT] = {"milliseconds": 9.5}
    return {"ops-sparse": {"results": [sparse]}, "ops-quantized": {"results": [quantized]}}


def cards_runs() -> list[dict]:
    """Two experts within a cap: diffusers' own offloading, and ours beside the whole GPU."""
    sizes = {"num_frames": 5, "height": 16, "width": 32}
    settings = {"config": "wan2.2-x", "experts": 2, **sizes, "steps": 4, "tokens": 512, "repeats": 2}
    measured = {"step_seconds": 2.0, "allocated": {"text encoding": 2 * 10**9, "decoding": 6 * 10**9}}
    components = [{"name": "text_encoder", "blocks": 9 * 10**9, "table": 2 * 10**9}]
    plan = {"components": components, "streaming": [], "tiles": False, "decoding": None}
    plan["peaks"] = {"text encoding": 21 * 10**8, "decoding": 63 * 10**8}
    rival = {"card": "8GB", "streaming": ["all"]}
    does_not_fit = {"seconds": None, "step_seconds": None, "allocated": {}}
    environment = {"torch": "2.11", "triton": "3.6", "diffusers": "0.42", "commit": "0123456789abcdef"}
    run = {"settings": {**settings, "bus_bytes_per_second": 5e10}, "environment": environment}
    rivals = [
        {"variant": "diffusers, by blocks", **rival, "tiles": False, **does_not_fit},
        {"variant": "diffusers, by leaves", **rival, "tiles": True, **measured, "seconds": 30.0, "videos": 1},
    ]
    ours = [
        {"variant": "quantized", "card": None, **plan, **measured, "seconds": 10.0},
        {"variant": "quantized", "card": "8GB", **plan, "decoding": 10**9, **measured, "seconds": 11.0},
    ]
    return [{**run, "cards": rivals}, {**run, "cards": ours}]
