"""Every step of the GPU session has a place on the results page, and what misses its target is marked there."""

import copy
import json
import re
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest

from scripts.benchmarks import gpu_session
from scripts.tools import write_pages
from scripts.tools.pages import cards, charts, checks, ops, readme, steps
from scripts.tools.pages.vae import vae_table
from tests.scripts.tools.pages.results import cards_runs
from turbo_rcm_patch.cli.side_by_side import strip_height

ROOT = Path(__file__).resolve().parents[3]


GPU = "nvidia-h200.json"
MEASURED = json.loads((ROOT / "results" / GPU).read_text())["runs"]
ENVIRONMENT = MEASURED["ops"]["environment"]
CAP = {
    "settings": {"config": "wan2.1-14b", "height": 480, "width": 832, "frames": 81},
    "environment": ENVIRONMENT,
    "cap_bytes": 24 * 10**9,
    "bf16_weight_bytes": 28 * 10**9,
    "weight_bytes": 15 * 10**9,
    "patching_seconds": 30.0,
    "step_seconds": 3.21,
    "peak_bytes": 20 * 10**9,
    "finite": True,
}
OFFLOADED = {
    "settings": {"config": "wan2.1-14b", "layers": 40, "frames": 81, "height": 480, "width": 832, "repeats": 3},
    "environment": ENVIRONMENT,
    "offloaded_steps": [
        {"tier": "quantized", "weights": "resident", "step_seconds": 1.6, "peak_bytes": 15 * 2**30}
        | {"bytes_between_steps": 14 * 2**30, "block_bytes": 2**28, "other_bytes": 2**28, "finite": True},
        {"tier": "quantized", "weights": "offloading enabled after the patch", "step_seconds": 1.7}
        | {"peak_bytes": 3 * 2**30, "bytes_between_steps": 2**29, "block_bytes": 2**28, "other_bytes": 2**28}
        | {"finite": True},
    ],
}
IMPLEMENTATIONS = {
    "environment": ENVIRONMENT,
    "rows": [
        {"implementation": name, "speedup": speedup, "latency": 1e-3 / speedup, "status": "ok"}
        | {"B": 4, "N": 512, "C": 768, "dtype": "bfloat16", "mode": "forward"}
        for name, speedup in (("two_pass", 1.0), ("triton_fused", 1.25))
    ],
}
KEPT = {"transformer.blocks.0": {"1": 1.0, "4": 0.5}, "transformer.blocks.1": {"1": 0.25, "4": 0.125}}

ATTENTION_ERRORS = {
    "settings": {"tokens": 4096, "heads": 4, "head_dim": 128},
    "environment": ENVIRONMENT,
    "attention_errors": [
        {"values": "structured", "count": 1, "cosine": 0.9999, "relative_l1": 0.013, "relative_l2": 0.014}
        | {"rival_l2": 0.045, "beside_rival": 0.31, "missed": []}
    ],
}


VIDEO = {"text_encoding": 0.25, "steps": [0.5, 0.5], "vae_decode": 0.5, "output": 0.25, "total": 2.25}
FIRST_VIDEO = {
    "settings": {"config": "wan2.1-x", "frames": 5, "height": 16, "width": 32, "steps": 2, "tokens": 512},
    "environment": ENVIRONMENT,
    "first_videos": {"sparse": {"build": 4.0, "patch": 1.5, "first": {**VIDEO, "total": 5.25}, "second": VIDEO}},
}
HOST_MEMORY = {"peak": 15 * 10**9, "pinned": 14 * 10**9, "weights": 10 * 10**9, "seconds": 30}
SOUND = {
    "settings": {"config": "ltx2-19b", "layers": 8, "height": 512, "width": 768, "num_frames": 121},
    "environment": ENVIRONMENT,
    "sound": [{"preset": "exact", "cuda_graph": "on", "step": 40.0, "video_alone": 38.0}],
}
TEXT_ENCODER = {
    "settings": {"padded": 512},
    "environment": ENVIRONMENT,
    "rows": [
        {"variant": "patched, 8 bits", "tokens": 96, "seconds": 0.0125, "weights": 7 * 10**9, "beside": 10**8}
        | {"error": 0.01, "of_bf16": 1.75}
    ],
}


def vae_run() -> dict:
    times = {"unpatched": 2.0, "torch.compile": 1.5, "patched": 0.9}
    rows = [
        {"work": work, "variant": name, "seconds": time, "bytes": int(1e9 * time), "error": 0.01, "predicted": None}
        for work in ("decode", "encode")
        for name, time in times.items()
    ]
    settings = {"config": "wan2.1-x", "height": 16, "width": 32, "num_frames": 5, "repeats": 3}
    return {"settings": settings, "environment": ENVIRONMENT, "vae": rows}


def all_runs() -> dict:
    steps = gpu_session.MEASUREMENTS.items()
    return {
        name: run_of(name, command, preset)
        for step, command in steps
        for preset, name in gpu_session.runs_of(step).items()
    }


def run_of(name: str, command: tuple[str, ...], preset: str) -> dict:
    """Return a run of a step: its own figures, or a similar step's with its settings."""
    if not preset:
        preset = command[command.index("--preset") + 1] if "--preset" in command else "exact"
    if "memory_cap" in command[0]:
        return copy.deepcopy(CAP)
    if "group_offload" in command[0]:
        return copy.deepcopy(OFFLOADED)
    if "small_cards" in command[0]:
        return cards_runs()["--rivals" not in command]
    if "first_video" in command[0]:
        return copy.deepcopy(FIRST_VIDEO)
    if "host_memory" in command[0]:
        return {"settings": {"config": name, "experts": 1, "vram": "8GB"}, "host_memory": HOST_MEMORY}
    if "sound" in command[0]:
        return copy.deepcopy(SOUND)
    if "benchmarks/vae" in command[0]:
        return vae_run()
    if "text_encoder" in command[0]:
        return copy.deepcopy(TEXT_ENCODER)
    if "compare_implementations" in command[0]:
        return copy.deepcopy(IMPLEMENTATIONS)
    if "measure_attention_error" in command[0]:
        return copy.deepcopy(ATTENTION_ERRORS)
    if "benchmarks/exchange" in command[0]:
        settings = {"ulysses": int(command[-1]), "heads": 12, "tokens": len(name), "head_dim": 128}
        return {"settings": settings, "environment": ENVIRONMENT, "milliseconds": {"attention": 2.5}}
    if "benchmarks/ops" in command[0]:
        like = "ops"
    elif "host_time" in command[0]:
        like = "host-time"
    elif "end_to_end" in command[0]:
        like = "wan2.1-1.3b-decoded" if "--decode" in command else "wan2.1-1.3b"
    else:
        like = next((step for step in ("verify", "compare", "evaluate") if step in command), name)
    run = copy.deepcopy(MEASURED.get(name) or MEASURED.get(like) or MEASURED[f"{like}-quantized"])
    run["environment"] = ENVIRONMENT
    if "settings" in run and like != "ops":
        run["settings"]["preset"] = preset
    if like == "verify" and preset == "block_sparse":
        run["kept"] = KEPT
    if like == "evaluate":
        names = {"quantized": preset}
        run["results"] = [{**row, "variant": names.get(row["variant"], row["variant"])} for row in run["results"]]
    return run


def page_of(folder: Path, runs: dict) -> str:
    (folder / GPU).write_text(json.dumps({"gpu": "GPU X", "runs": runs}))
    return write_pages.results_page(folder)


def test_every_measurement_shows_on_the_page(tmp_path):
    """Beside `ops`, which shows the versions that all share here, and `evaluate`, which other tiers stand beside."""
    runs = all_runs()
    base = {name: runs.pop(name) for name in ("ops", "evaluate")}
    page = page_of(tmp_path, base)
    assert page_of(tmp_path, {**base, "unknown": {"environment": ENVIRONMENT}}) == page
    assert [name for name, run in runs.items() if page_of(tmp_path, {**base, name: run}) == page] == []


def test_the_newest_gpu_is_first_and_begins_with_a_summary(tmp_path):
    runs = {"wan2.1-1.3b": MEASURED["wan2.1-1.3b"]}
    for name in ("nvidia-b200", "nvidia-h100-80gb-hbm3", "nvidia-h200"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"gpu": name, "runs": runs}))
    page = write_pages.results_page(tmp_path)
    names = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert names == ["nvidia-b200", "nvidia-h200", "nvidia-h100-80gb-hbm3"]
    for section in page.split("\n## ")[1:]:
        summary, *details = section.split('<details markdown="1">')
        assert steps.short_tables(runs) in summary
        assert "All variants" not in summary
        assert all(part.count("</details>") == 1 for part in details)
        assert not any(part.split("</details>")[1].strip() for part in details)


def test_every_target_is_of_a_measurement():
    targets = (steps.STEP_TARGETS, steps.MEMORY_TARGETS, steps.DECODE_TARGETS, steps.STAGE_LIMITS, steps.LORA_TARGETS)
    targets += (steps.STAGE_TARGETS, steps.VAE_8BIT_LIMITS, steps.TINY_VAE_LIMITS)
    named = {name for table in targets for name in table} | {name for name, *_ in steps.SHORT_SECONDS}
    assert named | set(charts.WITH_STEPS) <= set(all_runs())


def test_a_step_under_a_cap_on_memory():
    text = ops.memory_cap(CAP)
    assert "a cap of 24 GB on the GPU's memory, a step of wan2.1-14b, 81×480×832, in 8 bits takes 3.21 s" in text
    assert "20.0 GB at its peak; its weights take 15.0 GB there, 0.54× those in bf16 (0.55× is wanted at most)" in text
    assert "**" not in text
    assert "0.57× ✗" in ops.memory_cap({**CAP, "weight_bytes": 16 * 10**9})
    assert "result is **not finite**" in ops.memory_cap({**CAP, "finite": False})
    missed = ops.memory_cap({**CAP, "step_seconds": None, "peak_bytes": None, "finite": False})
    assert "in 8 bits **does not fit**; its weights" in missed


def test_the_shipped_picture_is_amplified_as_the_page_says():
    page = (ROOT / "results/README.md").read_text()
    gain = int(re.search(r"their difference, amplified (\d+) times", page)[1])
    picture = iio.imread(ROOT / "results/side-by-side.png").astype(int)
    frames = np.concatenate([frame[strip_height(160) :] for frame in np.split(picture, 3)])  # without their names
    unpatched, patched, difference = np.split(frames, 3, axis=1)
    amplified = gain * np.abs(patched - unpatched)
    assert 127 < difference.max() < 256
    assert np.abs(difference - amplified).max() <= gain + 1  # each panel is rounded for itself


def test_what_verify_checked():
    settings = {**MEASURED["verify-quantized"]["settings"], "preset": "exact"}
    errors = {"unpatched_error": {"mean": 3e-3}, "patched_error": {"mean": 2e-3, "largest": 3e-3}}
    blocks = {"count": 2, "failed": 0, **errors}
    decoding = {"unpatched_error": 1e-3, "patched_error": 2e-3, "ok": False}
    run = {"settings": settings, "blocks": blocks, "unreached": [], "decoding": None}
    table = checks.verified_table({"a": run, "b": {**run, "unreached": ["c"], "decoding": decoding}})
    assert "| embedded, 17×160×224, `a` | exact | 2 of blocks | 0 | 3.0e-03 | 2.0e-03 | 3.0e-03 |" in table
    assert "| embedded, 17×160×224, `b` | exact | 2 of blocks | 1 ✗ | 3.0e-03 |" in table
    assert "|  |  | 1 of decoding | 1 ✗ | 1.0e-03 | 2.0e-03 | 2.0e-03 |" in table
    part = {"c": {**run, "settings": {**MEASURED["verify-wan2.1-1.3b-quantized"]["settings"], "layers": 2}}}
    assert "| wan2.1-1.3b (2 of 30 layers), 81×480×832, `c` | quantized | 2 of blocks |" in checks.verified_table(part)


@pytest.mark.parametrize(
    ("peak", "weights", "shown"),
    [
        (3.0, 0.5, "memory 1.0, weights 0.55 | 3.00 (0.75×, weights 0.50×) |"),
        (4.2, 0.6, "memory 1.0, weights 0.55 | 4.20 (1.05× ✗, weights 0.60× ✗) |"),
        (3.0, None, "memory 1.0 | 3.00 (0.75×) |"),
    ],
)
def test_memory_in_8_bits_has_targets_beside_the_exact_tier_and_bf16(peak, weights, shown):
    variants = [
        {"name": name, "timings": {"steps": [0.5], "peak_memory": memory * 2**30}, "latents": None, "weights": share}
        for name, memory, share in (
            ("unpatched", 6.0, None if weights is None else 1.0),
            ("torch.compile", 2.0, None),
            ("patched exactly", 4.0, None),
            ("patched", peak, weights),
        )
    ]
    run = {"settings": MEASURED["wan2.1-1.3b-quantized"]["settings"], "variants": variants}
    rows = steps.step_rows("wan2.1-1.3b-quantized", run)
    assert shown in f"| {' | '.join(rows[-1])} |"
    assert steps._memory_ratio("wan2.1-1.3b-quantized", run) == f"{peak / 2:.2f}×"  # over compile's: no target


def test_a_sparse_step_is_compared_with_dense_8_bits():
    times = {"unpatched": 0.6, "patched, dense in 8 bits": 0.3, "patched": 0.2}
    variants = [
        {"name": name, "timings": {"steps": [step], "peak_memory": 2**30}, "latents": None}
        for name, step in times.items()
    ]
    settings = {**MEASURED["wan2.1-1.3b"]["settings"], "preset": "block_sparse"}
    rows = steps.step_rows("wan2.1-1.3b-block-sparse", {"settings": settings, "variants": variants})
    assert rows[-1][2] == "200.0 (1.50× over dense in 8 bits)"


@pytest.mark.parametrize(
    ("step", "shown"), [(0.14, "0.56 | 0.58 | 0.02 |  | 1.04"), (0.15, "0.60 ✗ | 0.58 | 0.02 |  | 1.40 ✗")]
)
def test_a_sparse_video_has_targets_and_a_place_in_the_summary(step, shown):
    name = "wan2.1-1.3b-decoded-sparse"
    run = copy.deepcopy(MEASURED["wan2.1-1.3b-decoded"])
    run["settings"]["preset"] = "sparse"
    run["settings"].pop("tokens", None)
    run["variants"] = [one for one in run["variants"] if one["name"] in ("unpatched", "torch.compile", "patched")]
    eager, compiled, patched = (variant["timings"] for variant in run["variants"])
    eager["total"], compiled["total"] = 4.59, 3.44
    patched |= {"steps": [step] * 4, "vae_decode": 0.58, "output": 0.02, "total": 1.04 if step < 0.15 else 1.4}
    table = steps.whole_videos_table({name: run})
    assert f"| patched (sparse) |  | {shown}" in table
    assert "| steps 0.57 s / total 1.05 s |" in table
    short = steps.short_tables({"wan2.1-1.3b": MEASURED["wan2.1-1.3b"], name: run})
    total = "1.04" if step < 0.15 else "1.40 ✗"
    assert f"4 steps, sparse, embeddings to frames | 4.59 | 3.44 | {total} |" in short


def test_a_pipeline_and_diffusers_own_offloading_share_a_table():
    """Also where the two were timed with different commits."""
    rivals, ours = cards_runs()
    base = "small-cards-x"
    one, other = {base: ours, "ops": {}, f"{base}-diffusers": rivals}, {f"{base}-8-bits": ours}
    assert cards.cards_of({**one, **other}) == [[rivals, ours], [ours]]
    assert cards.cards_of({f"{base}-diffusers": rivals}) == [[rivals]]
    rivals["environment"] = {**rivals["environment"], "commit": "f" * 40}
    text = cards.cards_table([rivals, ours])
    assert "commit 0123456789ab; diffusers' offloading with torch 2.11, triton 3.6, diffusers 0.42, commit ffff" in text
    assert text.index("| diffusers, by leaves") < text.index("| quantized")


@pytest.mark.parametrize(
    ("settings", "row", "shown"),
    [
        ({}, {"seconds": 11.6}, "| 11.60 (1.16×) ✗ | 2.000 (1.00×) |"),
        ({"experts": 1}, {"seconds": 11.1}, "| 11.10 (1.11×) ✗ | 2.000 (1.00×) |"),
        ({"experts": 1}, {"step_seconds": 2.2}, "| 11.00 (1.10×) | 2.200 (1.10×) |"),
        ({"experts": 1, "config": "wan2.1-14b", "height": 480}, {"step_seconds": 2.2}, "| 2.200 (1.10×) ✗ |"),
        ({}, {"allocated": {"denoising": 38 * 10**8}}, "| denoising 3.80 |"),
        (
            {"experts": 1, "config": "wan2.1-14b", "height": 480},
            {"allocated": {"denoising": 38 * 10**8}, "peaks": {"denoising": 37 * 10**8}},
            "| denoising 3.80 ✗ (3.70 ✗) |",
        ),
        ({}, {"peaks": {"decoding": 67 * 10**8}}, "decoding 6.00 (6.70 ✗) |"),
    ],
)
def test_what_misses_its_limit_within_a_cap_is_marked(settings, row, shown):
    _, ours = cards_runs()
    ours["settings"] |= settings
    ours["cards"][-1] |= row
    text = cards.cards_table([ours])
    assert shown in text
    assert text.count("**") == shown.count("**")


def test_a_pipeline_with_sound_shows_its_stages_in_their_order():
    _, run = cards_runs()
    assert " tokens to frames, 4 steps" in cards.cards_table([run])
    peaks = {"denoising": 5, "decoding": 6, "decoding the sound": 4, "making the waveform": 3}
    run["settings"] |= {"config": "ltx2-19b", "experts": 1, "sound": True}
    run["cards"][-1] |= {"allocated": {stage: peak * 10**9 for stage, peak in peaks.items()}, "peaks": {}}
    text = cards.cards_table([run])
    assert "ltx2-19b, 5×16×32 from a prompt of 512 tokens to frames and sound, 4 steps" in text
    assert "| denoising 5.00, decoding 6.00, decoding the sound 4.00, making the waveform 3.00 |" in text
    assert "LTX-2 19B, 32×16, 5 frames" in readme.cards_table([run])


def test_the_readme_has_the_smallest_card_of_a_pipeline_in_the_fastest_way():
    rivals, run = cards_runs()
    (whole,) = (row for row in run["cards"] if row["card"] is None)
    name = "Wan 2.2 A14B, 32×16, 5 frames"
    run["cards"][-1]["streaming"] = ["text_encoder"]
    slowest = [f"| 8 GB | {name} | quantized | 6.00 | 11 | 11.0 | 10.0 |"]
    assert readme.cards_table([rivals, run]).splitlines()[2:] == slowest
    fits, missed = run["cards"][-1], {"card": "4GB", "variant": "quantized", "seconds": None, "allocated": {}}
    faster = "quantized, text encoder in 8 bits"
    run["cards"] += [{**fits, "card": "12GB", "seconds": 10.5}, missed]
    run["cards"] += [{**whole, "variant": faster}, {**fits, "variant": faster, "seconds": 10.25}]
    line = "quantized, before `fit`: `trp.patch_text_encoder(pipe, in_8_bits=True)`"
    fastest = [f"| 8 GB | {name} | {line} | 6.00 | 11 | 10.2 | 10.0 |"]
    assert readme.cards_table([rivals, run]).splitlines()[2:] == fastest


def test_the_readme_has_whole_videos_from_a_prompt_or_else_from_embeddings():
    names = "wan2.1-1.3b-decoded", "wan2.1-1.3b-decoded-sparse"
    runs = {name: copy.deepcopy(MEASURED[name]) for name in ("wan2.1-1.3b", *names)}
    for name, total in zip(names, (2.25, 1.25), strict=True):
        runs[name]["settings"].pop("tokens", None)
        (patched,) = (one for one in runs[name]["variants"] if one["name"] == "patched")
        patched["timings"]["total"] = total
    line = " ".join(readme.headline({"gpu": "GPU X", "runs": runs}).split())
    assert "A 4-step video, embeddings to frames, takes 2.25 s (exact) and 1.25 s (sparse); with" in line
    runs[names[1]]["settings"]["tokens"] = 512
    line = " ".join(readme.headline({"gpu": "GPU X", "runs": runs}).split())
    assert "A 4-step video, prompt to frames, takes 1.25 s (sparse); with" in line


def test_a_vae_alone():
    text = vae_table(run := vae_run())
    assert "| decode | patched | 0.900 | 2.22× | 1.67× | 0.90 |  | 1.0e-02 |  |" in text
    assert "| encode | patched | 0.900 | 2.22× ✗ | 1.67× | 0.90 |  | 1.0e-02 |  |" in text
    run["vae"][-1]["bytes"] = int(2.1e9)
    assert "| 2.10 ✗ |" in vae_table(run)
    row = {**run["vae"][2], "variant": "patched, 8 bits", "seconds": 0.5, "psnr": 43.21}
    run["vae"].append(row)
    assert "| decode | patched, 8 bits | 0.500 | 4.00× | 3.00× | 0.90 |  | 1.0e-02 | 43.2 |" in vae_table(run)
    row.update(seconds=0.8, psnr=41.9)
    assert "| 0.800 | 2.50× ✗ | 1.88× ✗ | 0.90 |  | 1.0e-02 | 41.9 ✗ |" in vae_table(run)


@pytest.mark.parametrize(("seconds", "shown"), [(0.09, "0.090"), (0.11, "0.110 ✗")])
def test_output_as_pil_is_no_slower_than_as_numpy(seconds, shown):
    run = vae_run()
    times = {"output, numpy": (0.3, 0.1), "output, PIL": (0.4, seconds)}
    for work, each in times.items():
        for variant, time in zip(("unpatched", "patched"), each, strict=True):
            run["vae"].append({**run["vae"][0], "work": work, "variant": variant, "seconds": time, "error": None})
    text = vae_table(run)
    assert "| output, numpy | patched | 0.100 | 3.00× |  |" in text
    assert f"| output, PIL | patched | {shown} | {0.4 / seconds:.2f}× |  |" in text


@pytest.mark.parametrize(
    ("size", "variant", "seconds", "shown"),
    [
        ((81, 480, 832), "tiny VAE", 0.0601, "0.060 ✗"),
        ((81, 480, 832), "tiny VAE", 0.06, "0.060"),
        ((81, 720, 1280), "tiny VAE", 0.2, "0.200"),
        ((121, 704, 1280), "patched", 2.1, "2.100 ✗"),
        ((121, 704, 1280), "patched", 2.0, "2.000"),
        ((81, 480, 832), "patched", 2.1, "2.100"),
    ],
)
def test_seconds_that_a_decode_may_take(size, variant, seconds, shown):
    run = vae_run()
    run["settings"] |= dict(zip(("num_frames", "height", "width"), size, strict=True))
    decode = run["vae"][2]
    decode["seconds"] = seconds
    run["vae"].append({**decode, "variant": variant})
    text = vae_table(run)
    assert f"| decode | {variant} | {shown} |" in text
    assert ("a decode in" in text) == (size != (81, 720, 1280))


def test_offloaded_steps_are_compared_with_resident_ones_of_their_tier():
    run = copy.deepcopy(OFFLOADED)
    rows = run["offloaded_steps"]
    rows.append({**rows[1], "tier": "exact"})
    text = ops.group_offload_table(run)
    assert "| quantized | resident | 1.60 | 1.00× | 15.00 |" in text
    assert "| quantized | offloading enabled after the patch | 1.70 | 1.06× | 3.00 |" in text
    assert "| exact | offloading enabled after the patch | 1.70 |  | 3.00 |" in text
    rows[1]["step_seconds"] = 1.77
    assert "| 1.77 | 1.11× ✗ | 3.00 |" in ops.group_offload_table(run)
    run["settings"]["variables"] = {"REUSED": "1", "SIZE": "2"}
    assert "on a stream, with `REUSED=1 SIZE=2`; the median" in ops.group_offload_table(run)


@pytest.mark.parametrize(
    ("variant", "tokens", "seconds", "shown"),
    [
        ("patched", 512, 0.0151, "15.1 ✗"),
        ("patched", 512, 0.015, "15.0"),
        ("patched", 96, 0.02, "20.0"),
        ("patched, CUDA graph", 512, 0.02, "20.0 ✗"),
        ("transformers", 512, 0.04, "40.0"),
        ("patched, streaming", 512, 0.2, "200.0"),
    ],
)
def test_the_text_encoders_time(variant, tokens, seconds, shown):
    row = {**TEXT_ENCODER["rows"][0], "variant": variant, "tokens": tokens, "seconds": seconds}
    assert f"| {variant} | {tokens} | {shown} | 7.00 |" in cards.text_encoder_table({**TEXT_ENCODER, "rows": [row]})


def test_the_hosts_memory():
    run = {"settings": {"config": "wan2.1-14b", "experts": 2, "vram": "8GB"}, "host_memory": HOST_MEMORY}
    text = cards.host_memory(run)
    assert "of wan2.1-14b, two experts for 8GB take 15.00 GB of the host's memory at most, 14.00 GB of it pin" in text
    assert "That is 1.50× one transformer's 10.00 GB in 8 bits (2.5× is wanted at most)" in text
    run["settings"]["experts"] = 1
    assert "1.50× ✗" in cards.host_memory(run)
