import copy
from pathlib import Path

import pytest

from scripts.benchmarks.comparison import COMPILED_AFTER_A_CHANGE
from scripts.benchmarks.end_to_end import IN_8_BITS, TINY_VAE
from scripts.benchmarks.lora import ALONE, RESCALED, SWITCHED, WITHOUT
from scripts.tools import write_pages
from scripts.tools.pages import charts, readme, steps
from tests.scripts.tools.pages.results import step_run


def _line(cells):
    return f"| {' | '.join(cells)} |"


def _step_lines(name, run):
    return [_line(row) for row in steps.step_rows(name, run)]


def test_steps_are_compared_with_eager_and_with_compile():
    run = step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)
    assert _step_lines("wan2.1-1.3b", run)[2] == (
        "|  | patched (exact) | 500.0 | 1.80× | 1.20× | 1.45 / 1.2 | 1.00 |  |  |"
    )
    run = step_run("wan2.1-1.3b", compiled=0.6, patched=0.5, errors=(0.003, 0.002, 0.0021))
    rows = _step_lines("wan2.1-1.3b", run)
    assert [row.split(" | ")[-2] for row in rows] == ["3.0e-03", "2.0e-03", "2.1e-03"]
    run = step_run("wan2.1-1.3b", compiled=0.6, patched=0.5, errors=(0.003, 0.002, 0.0022))
    rows = _step_lines("wan2.1-1.3b", run)
    assert [row.split(" | ")[-2] for row in rows] == ["3.0e-03", "2.0e-03", "2.2e-03 ✗"]
    run = step_run("wan2.1-1.3b", compiled=0.59, patched=0.5)
    assert "| 1.80× | 1.18× ✗ | 1.45 / 1.2 |" in _step_lines("wan2.1-1.3b", run)[2]
    slow = step_run("wan2.1-1.3b", compiled=0.9, patched=0.7)
    assert "| 1.29× ✗ | 1.29× | 1.45 / 1.2 |" in _step_lines("wan2.1-1.3b", slow)[2]
    assert "| 1.80× | 1.18× ✗ | – / 1.2 |" in _step_lines("wan2.1-1.3b-17-frames", run)[2]
    assert "| 1.80× | 1.18× |  |" in _step_lines("another", run)[2]


def _video_run(patched, error, memory=2**31):
    def variant(name, decode, error):
        stages = {"steps": [0.2, 0.2], "vae_decode": decode, "output": 0.05, "total": decode + 0.5}
        stages["text_encoding"] = 0.0123
        peak = memory if name == "patched" else 2**31
        return {"name": name, "timings": {**stages, "peak_memory": peak}, "latents": None, "decode_error": error}

    run = step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)
    decodes = {"unpatched": (1.8, 0.01), "torch.compile": (1.0, 0.01), "patched": (patched, error)}
    run["variants"] = [variant(name, *each) for name, each in decodes.items()]
    run["settings"] |= {"output_type": "np", "num_inference_steps": 2}
    return run


def test_whole_videos_are_a_table_of_their_own():
    runs = {"wan2.1-1.3b-decoded": _video_run(0.5, 0.0101)}
    assert charts.real_models(runs) == {}
    measured = write_pages._measured(Path("gpu.json"), runs, [])
    asked = "–× / 1.75× / decode 0.5 s / output 0.1 s / total 2.2 s"
    shown = "0.40 | 0.50 | 0.05 |  | 1.00 | 1.50× | 3.60× | 2.00×"
    assert f"|  | patched (exact) |  | {shown} |  | {asked} | 2.00 | 1.0e-02 |" in measured
    assert (
        "| eager diffusers |  | 0.40 | 1.80 | 0.05 |  | 2.30 | 0.65× | 1.00× | 0.56× |  |  | 2.00 | 1.0e-02 |"
        in measured
    )
    assert "over compile, which compiles the decoder too" in measured
    assert "One denoising step" not in measured
    missed = steps.whole_videos_table({"wan2.1-1.3b-decoded": _video_run(0.61, 0.0106)})
    assert "| 0.40 | 0.61 ✗ | 0.05 |  | 1.11 | 1.35× | 2.95× | 1.64× ✗ |" in missed
    assert "1.1e-02 ✗ |" in missed
    more = steps.whole_videos_table({"wan2.1-1.3b-decoded": _video_run(0.5, 0.01, memory=2**31 + 2**27)})
    assert "| 2.12 ✗ | 1.0e-02 |" in more
    counted = steps.whole_videos_table({"another": _video_run(0.5, 0.01) | {"decode_flops": 300e12}})
    assert "| 1.00× | 0.56× | 167 |" in counted
    assert "| 3.60× | 2.00× | 600 |" in counted


@pytest.mark.parametrize(
    ("name", "patched", "shown", "asked"),
    [
        ("wan2.2-5b-decoded", 1.0, "1.00 | 0.05 |  | 1.50 (1.53× over torch.compile)", "total 1.5× over torch.compile"),
        (
            "wan2.2-5b-decoded",
            1.1,
            "1.10 | 0.05 |  | 1.60 (1.44× ✗ over torch.compile)",
            "total 1.5× over torch.compile",
        ),
        ("wan2.2-5b-decoded", 2.1, "2.10 ✗ | 0.05 |  | 2.60 (0.88× ✗ over torch.compile)", "decode 2.0 s / total 1.5×"),
        ("wan2.2-5b-decoded-quantized", 1.0, "1.00 | 0.05 |  | 1.50 (1.53× ✗ over torch.compile)", "total 2.0× over"),
    ],
)
def test_stages_have_targets_beside_other_variants(name, patched, shown, asked):
    run = _video_run(patched, 0.01)
    rival = run["variants"][1]
    rival["timings"] |= {"vae_decode": 1.5, "total": 2.3}
    run["variants"].insert(2, {**rival, "name": "patched exactly"})
    lines = steps.whole_videos_table({name: run}).splitlines()
    line = next(line for line in lines if "| patched (exact) |" in line)
    assert f" | {shown} |" in line
    assert asked in line
    if name in ("wan2.2-5b-decoded", "wan2.2-5b-decoded-quantized"):
        over_compile = shown.partition("(")[2].partition(" over")[0]
        short = steps.short_tables({"x": step_run("x", compiled=0.6, patched=0.5), name: run})
        assert f" | {patched + 0.5:.2f} | {2.3 / (patched + 0.5):.2f}× | {over_compile} |" in short


def test_the_summary_has_a_table_of_a_whole_video():
    steps_run = step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)
    assert "whole video" not in steps.short_tables({"wan2.1-1.3b": steps_run})
    runs = {"wan2.1-1.3b": steps_run, "wan2.1-1.3b-decoded": _video_run(0.61, 0.01)}
    lines = steps.short_tables(runs).splitlines()
    assert lines[-4].startswith("| a whole video, or its decoding | eager, s | compile, s | patched, s |")
    whole = "a whole video of wan2.1-1.3b, 5×16×32, 2 steps, exact, embeddings to frames"
    assert lines[-2:] == [
        f"| {whole} | 2.30 | 1.50 | 1.11 | 2.07× | 1.35× | 1.00× |",
        "| decoding alone, Wan 2.1's VAE, 5×16×32 | 1.80 | 1.00 | 0.61 ✗ | 2.95× | 1.64× ✗ | 1.00× |",
    ]
    timings = runs["wan2.1-1.3b-decoded"]["variants"][-1]["timings"]
    timings["peak_memory"], timings["total"] = 2 * timings["peak_memory"], 2.3
    assert "| 1.50 | 2.30 ✗ | 1.00× | 0.65× | 2.00× ✗ |" in steps.short_tables(runs)
    del runs["wan2.1-1.3b-decoded"]["variants"][1]
    assert "| 2.30 | not run | 2.30 ✗ |" in steps.short_tables(runs)


def test_a_whole_video_from_a_prompt_and_with_other_vaes():
    """Each VAE has a limit of its own. The tiny one has no TFLOP/s of diffusers' decoder."""
    run = _video_run(0.5, 0.01) | {"decode_flops": 300e12}
    run["settings"] |= {"tokens": 512, "preset": "sparse"}
    tiny = copy.deepcopy(run["variants"][-1]) | {"name": TINY_VAE, "decode_error": None}
    tiny["timings"] |= {"vae_decode": 0.07, "total": 0.61}
    in_8_bits = copy.deepcopy(tiny) | {"name": IN_8_BITS}
    in_8_bits["timings"] |= {"vae_decode": 0.3, "total": 0.86}
    run["variants"] += [in_8_bits, tiny]
    table = steps.whole_videos_table({"wan2.1-1.3b-decoded-sparse": run})
    assert "|  | patched (sparse) | 0.012 | 0.40 |" in table
    shown = "0.012 | 0.40 | 0.07 ✗ | 0.05 |  | 0.61 ✗ | 2.46× | 25.71× | 14.29× |  |"
    assert f"|  | {TINY_VAE} | {shown} decode 0.06 s / total 0.6 s | 2.00 |  |" in table
    shown = "0.012 | 0.40 | 0.30 | 0.05 |  | 0.86 ✗ | 1.74× | 6.00× | 3.33× | 1000 | total 0.85 s | 2.00 |  |"
    assert f"|  | {IN_8_BITS} | {shown}" in table
    assert "2 steps, sparse, prompt to frames |" in steps.short_tables(
        {"a": step_run("a", 0.6, 0.5), "wan2.1-1.3b-decoded-sparse": run}
    )


def _video_with_sound():
    """A whole video of LTX-2 with all its layers."""
    run = _video_run(1.0, None, memory=2**32)
    run["settings"] |= {"config": "ltx2-19b", "layers": 48, "preset": "sparse", "num_inference_steps": 4}
    for variant in run["variants"]:
        variant["decode_error"] = None
        variant["timings"] |= {"steps": [0.6] * 4, "sound": 0.0421}
    run["variants"][-1]["timings"]["steps"] = [0.15, 0.15, 0.15, 0.16]
    return run


def test_a_whole_video_with_sound_is_named_so():
    runs = {"ltx2-19b-1024p-sparse": _video_with_sound()}
    page = write_pages._measured(Path("gpu.json"), runs, [])
    assert "| output, s | sound, s | total, s |" in page
    assert (
        "| ltx2-19b (48 layers), 5×16×32, `ltx2-19b-1024p-sparse` | eager diffusers |  | 2.40 | 1.80 | 0.05 |" in page
    )
    assert "| patched (sparse) |  | 0.61 | 1.00 | 0.05 | 0.042 | 1.50 |" in page
    whole = "a whole video of ltx2-19b (48 layers), 5×16×32, 4 steps, sparse, embeddings to frames and sound"
    assert f"| {whole} | 2.30 | 1.50 | 1.50 |" in steps.short_tables(runs)


def test_steps_of_a_whole_video_stand_beside_those_timed_alone():
    """Its memory does not, because decoding counts in it."""
    runs = {"ltx2-19b-1024p-sparse": _video_with_sound()}
    page = write_pages._measured(Path("gpu.json"), runs, [])
    label = "ltx2-19b (48 layers), 5×16×32"
    assert f"| {label}, `ltx2-19b-1024p-sparse` | eager diffusers | 600.0 | 1.00× | 1.00× |  |  |  |  |" in page
    assert "|  | patched (sparse) | 150.0 | 4.00× | 4.00× | – / 3.0 |  |  |  |" in page
    assert f"| {label} | sparse | 600 | 600 | not run | 150 | 4.00× |  |  |" in steps.short_tables(runs)
    ((model, tiers),) = charts.speedups_by_tier(runs).items()
    assert (model, tiers) == ("LTX-2 19B\n32×16, 5 frames", {"sparse": 4.0})
    assert '| `"sparse"` | 4.00× |  |' in readme.tiers_table(runs)
    assert runs["ltx2-19b-1024p-sparse"]["variants"][-1]["timings"]["peak_memory"] == 2**32
    assert charts.real_models({"another": _video_with_sound()}) == {}


def test_a_whole_video_of_two_experts_has_a_limit_on_its_seconds():
    run = _video_run(7.51, 0.01)
    run["settings"] |= {"config": "wan2.2-a14b", "layers": 40, "tokens": 512, "preset": "quantized"}
    del run["variants"][1]
    runs = {"wan2.2-a14b-decoded": run}
    whole = "a whole video of wan2.2-a14b (40 layers), 5×16×32, 2 steps, quantized, prompt to frames"
    assert f"| {whole} | 2.30 | not run | 8.01 ✗ |" in steps.short_tables({"a": step_run("a", 0.6, 0.5), **runs})
    assert "| 8.01 ✗ |  | 0.24× |  |  | total 8.0 s |" in steps.whole_videos_table(runs)


def test_a_variant_that_was_not_run_says_so():
    run = step_run("wan2.1-1.3b", compiled=0.6, patched=0.5)
    run["settings"]["preset"] = "quantized"
    table = steps.short_tables({"wan2.1-1.3b": step_run("x", 0.6, 0.5), "8-bit": run})
    assert "| quantized | 900 | 600 | not run | 500 |" in table


@pytest.mark.parametrize(("seconds", "shown"), [(0.257, "257.0 (1.008× without"), (0.27, "270.0 (1.059× ✗ without")])
def test_a_step_with_lora_is_compared_with_one_without(seconds, shown):
    times = {"unpatched": 0.33, "torch.compile": 0.28, "patched": seconds, WITHOUT: 0.255, RESCALED: 0.26}
    variants = [
        {"name": name, "timings": {"steps": [step] * 2, "peak_memory": 2**30}, "latents": None, "compiled": 0}
        for name, step in times.items()
    ]
    settings = {"config": "wan2.1-14b", "layers": 4, "num_frames": 81, "height": 480, "width": 832, "lora_ranks": [64]}
    rows = steps.step_rows("wan2.1-14b-4-layers-lora-64", {"settings": settings, "variants": variants})
    assert "wan2.1-14b (4 layers), 81×480×832, LoRA of rank 64" in rows[0][0]
    assert shown in rows[2][2]
    assert "≤ 1.03× without LoRA" in rows[2]
    assert [row[1] for row in rows[3:]] == [WITHOUT, RESCALED]
    assert charts.real_models({"x": {"settings": settings, "variants": variants}}) == {}


def test_a_step_after_a_change_is_compared_with_one_without():
    """Ours may take 5 ms more, and compile nothing; of the compiled rival only the step right after it counts."""
    times = {"unpatched": [0.33] * 3, "torch.compile": [0.28] * 3, "patched": [0.257] * 3, WITHOUT: [0.25] * 3}
    times |= {RESCALED: [0.2615] * 3, ALONE: [0.25] * 3, SWITCHED: [0.256] * 3}
    times[COMPILED_AFTER_A_CHANGE] = [0.28, 21.5, 0.28]
    variants = [
        {"name": name, "timings": {"steps": each, "peak_memory": 2**30}, "latents": None, "compiled": 0}
        for name, each in times.items()
    ]
    variants[4]["compiled"], variants[-1]["compiled"] = 2, 3
    settings = {"config": "wan2.1-14b", "num_frames": 81, "height": 480, "width": 832, "lora_ranks": [64, 64]}
    rows = {row[1]: row for row in steps.step_rows("x", {"settings": settings, "variants": variants})}
    assert rows[RESCALED][2] == "261.5 (+4.5 ms, 2 compiled ✗)"
    assert rows[SWITCHED][2] == "256.0 (+6.0 ms ✗, 0 compiled)"
    assert rows[ALONE][2] == "250.0"
    assert rows[COMPILED_AFTER_A_CHANGE][2] == "21500.0 (+21220.0 ms, 3 compiled)"
    asked = [name for name, row in rows.items() if row[5] == "≤ 5 ms on top, nothing compiled"]
    assert asked == [RESCALED, SWITCHED]


def test_memory_has_a_target_beside_compile():
    run = step_run("wan2.2-5b", compiled=0.6, patched=0.5)
    run["variants"][2]["timings"]["peak_memory"] = 1.15 * 2**30
    assert "memory 1.15 | 1.15 (1.15×) |" in _step_lines("wan2.2-5b-8-layers", run)[2]
    assert "| 1.15× |" in _line(steps.short_step_row("wan2.2-5b-8-layers", run))
    run["variants"][2]["timings"]["peak_memory"] = 1.2 * 2**30
    assert "memory 1.15 | 1.20 (1.20× ✗) |" in _step_lines("wan2.2-5b-8-layers", run)[2]
    assert "| 1.20× ✗ |" in _line(steps.short_step_row("wan2.2-5b-8-layers", run))
    assert "| 1.20× |" in _line(steps.short_step_row("another", run))
