"""scripts/benchmarks/end_to_end.py on the tiny case."""

import json

import pytest
import torch

from scripts.benchmarks import end_to_end
from tests.patching.tiny_vae.published import WIDTHS
from turbo_rcm_patch.bench import variants
from turbo_rcm_patch.bench.variants import memory_of
from turbo_rcm_patch.patching.tiny_vae import network


def test_every_stage_of_every_variant_is_timed(tmp_path, capsys):
    json_path = tmp_path / "benchmark.json"
    options = ["--config", "tiny", "--layers", "1", "--steps", "2", "--repeats", "1", "--decode", "--no-compile"]
    assert end_to_end.main([*options, "--vae-dtype", "bfloat16", "--json", str(json_path)]) == 0
    result = json.loads(json_path.read_text())
    assert (result["settings"]["layers"], result["settings"]["vae_dtype"]) == (1, "bfloat16")
    assert [variant["name"] for variant in result["variants"]] == ["unpatched", "patched"]
    assert len(result["variants"][0]["timings"]["steps"]) == 2
    assert result["variants"][1]["timings"]["vae_decode"] > 0
    assert result["variants"][1]["timings"]["output"] > 0
    assert 0 <= result["variants"][1]["latents"]["relative_l2"] < (1e-5 if not torch.cuda.is_available() else 5e-2)
    printed = capsys.readouterr().out
    for text in ("patched", "text encoding", "step 2", "VAE decode", "output", "total", "decoder, bfloat16 on"):
        assert text in printed


def test_it_checks_its_presets_first(capsys):
    for presets, message in (
        (["exact", "quantised"], "invalid choice: 'quantised'"),
        (["sparse"], "--mass is of block"),
        (["sparse", "--unstructured"], "--mass is of block"),
        (["block_sparse", "--other-vaes"], "give --decode too"),
        (["block_sparse", "--lora", "4", "--prompt"], "leave --prompt out"),
        (["block_sparse", "--config", "tiny-ltx2", "--prompt"], "--prompt is for Wan's models"),
    ):
        with pytest.raises(SystemExit):
            end_to_end.main(["--mass", "0.5", "--preset", *presets])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ulysses 0", "--ulysses 0: give 1 or more."),
        ("--layers 0", "--layers 0: give 1 or more."),
        ("--steps -1", "--steps -1: give 1 or more."),
        ("--repeats 0", "--repeats 0: give 1 or more."),
        ("--lora 4 0", "--lora 0: give 1 or more."),
        ("--frames 0", "--frames 0 is not 4k+1; try 1."),
        ("--frames 6", "--frames 6 is not 4k+1; try 5."),
        ("--height 470", "--height 470 is not divisible by 16; try 464."),
        ("--config wan2.2-5b --width 848", "--width 848 is not divisible by 32; try 832."),
        ("--preset block_sparse --mass 5", "--mass 5: give a share above 0 and at most 1."),
        ("--other-vaes --decode", "--other-vaes are not timed in the exact tier; give another --preset."),
    ],
)
def test_a_wrong_number_is_refused_before_a_model_is_built(capsys, options, message):
    """--ulysses 0 measured nothing, and ended well."""
    with pytest.raises(SystemExit, match="2"):
        end_to_end.parse_options(options.split())
    assert message in capsys.readouterr().err


def test_the_exact_tier_takes_its_figures_from_its_turns_with_the_quantized_one(tmp_path, monkeypatch, capsys):
    measured, measure = [], end_to_end.measure
    monkeypatch.setattr(
        end_to_end, "measure", lambda *args, **kwargs: measured.append(args[1]) or measure(*args, **kwargs)
    )
    json_path = tmp_path / "steps.json"
    options = ["--config", "tiny", "--steps", "1", "--repeats", "1", "--preset", "exact", "quantized"]
    assert end_to_end.main([*options, "--json", str(json_path)]) == 0
    assert measured == ["quantized"]
    figures = json.loads(json_path.read_text())
    exact, quantized = (figures[preset] for preset in ("exact", "quantized"))
    assert [run["settings"]["preset"] for run in (exact, quantized)] == ["exact", "quantized"]
    assert [variant["name"] for variant in exact["variants"]] == ["unpatched", "patched"]
    of_quantized = {variant["name"]: variant for variant in quantized["variants"]}
    unpatched, patched = exact["variants"]
    assert unpatched == of_quantized["unpatched"]
    assert patched == {**of_quantized["patched exactly"], "name": "patched"}
    assert patched["step_error"] < of_quantized["patched"]["step_error"]


def test_another_mass(tmp_path):
    json_path = tmp_path / "benchmark.json"
    options = ["--config", "tiny", "--layers", "1", "--steps", "1", "--repeats", "1", "--no-compile"]
    preset = ("--preset", "block_sparse", "--mass", "0.5")
    assert end_to_end.main([*options, *preset, "--json", str(json_path)]) == 0
    result = json.loads(json_path.read_text())
    assert result["settings"]["mass"] == 0.5


@pytest.mark.usefixtures("small_encoder")
def test_from_a_prompt_with_three_vaes(tmp_path, monkeypatch, capsys):
    """Patched variants have a patched text encoder. No frames are compared with the tiny VAE's."""
    encoders, decoders = [], []
    patch_text_encoder = end_to_end.patch_text_encoder
    monkeypatch.setattr(network, "WIDTHS", WIDTHS)
    monkeypatch.setattr(
        end_to_end, "patch_text_encoder", lambda pipe: encoders.append(patch_text_encoder(pipe)) or encoders[-1]
    )
    patch = end_to_end.patch
    monkeypatch.setattr(end_to_end, "patch", lambda pipe, config: decoders.append(config.vae) or patch(pipe, config))
    json_path = tmp_path / "benchmark.json"
    options = ["--config", "tiny", "--layers", "1", "--steps", "1", "--repeats", "1", "--no-compile", "--decode"]
    options += ["--prompt", "--other-vaes", "--preset", "sparse", "--json", str(json_path)]
    assert end_to_end.main(options) == 0
    result = json.loads(json_path.read_text())
    assert (result["settings"]["tokens"], result["settings"]["structured"]) == (512, True)
    of = {variant["name"]: variant for variant in result["variants"]}
    assert list(of) == [
        *(variants.UNPATCHED, variants.EXACT_PATCH, variants.PATCHED),
        *(end_to_end.IN_8_BITS, end_to_end.TINY_VAE),
    ]
    assert (decoders.count(True), decoders.count("8bit")) == (3 * 2, 2)
    assert all(variant["timings"]["text_encoding"] > 0 for variant in of.values())
    assert of[variants.EXACT_PATCH]["latents"]["relative_l2"] < 1e-4
    assert of[variants.PATCHED]["frames"]["psnr_db"] > 0
    assert of[end_to_end.TINY_VAE]["latents"] == of[variants.PATCHED]["latents"]
    assert of[end_to_end.TINY_VAE]["frames"] is result["difference_gain"] is None
    assert len(encoders) == 4 * 2  # a warm-up and a repeat of each
    assert not any(encoder.active for encoder in encoders)
    (psnr,) = (line for line in capsys.readouterr().out.splitlines() if "PSNR" in line)
    assert psnr.count("dB") == 3


@pytest.mark.parametrize(("preset", "others"), [("exact", []), ("sparse", [end_to_end.IN_8_BITS, end_to_end.TINY_VAE])])
def test_the_exact_tier_decodes_with_its_own_vae_alone(monkeypatch, preset, others):
    given = {}
    monkeypatch.setattr(end_to_end, "compare_checked", lambda *_, **options: given.update(options))
    monkeypatch.setattr(end_to_end, "without_frames", lambda *_: None)
    options = ["--config", "tiny", "--layers", "1", "--decode", "--other-vaes", "--preset", "exact", "sparse"]
    end_to_end.measure(end_to_end.parse_options(options), preset, torch.device("cpu"))
    assert list(given["beside"]) == others


@pytest.mark.usefixtures("small_encoder")
def test_two_experts_from_a_prompt(tmp_path, monkeypatch):
    """Each expert makes two steps of every video. Both are in 8 bits, and the weights' bytes count both."""
    calls, pipes, build = [], [], end_to_end.build_pipeline

    def counted(*args, **options):
        pipe = build(*args, **options)
        for name in ("transformer", "transformer_2"):
            getattr(pipe, name).register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        pipes.append(pipe)
        return pipe

    monkeypatch.setattr(end_to_end, "build_pipeline", counted)
    json_path = tmp_path / "benchmark.json"
    options = ["--config", "tiny-experts", "--prompt", "--decode", "--repeats", "1", "--preset", "quantized"]
    assert end_to_end.main([*options, "--json", str(json_path)]) == 0
    result = json.loads(json_path.read_text())
    of = {variant["name"]: variant for variant in result["variants"]}
    assert list(of) == [variants.UNPATCHED, variants.EXACT_PATCH, variants.PATCHED]
    # Each variant has a warm-up and a repeat. Before these are the judge's generation and a step of each variant.
    assert calls.count("transformer") == calls.count("transformer_2") == 2 * (1 + 2 * 3) + 3
    built = pipes[0]
    assert of[variants.UNPATCHED]["weights"] == memory_of(built.transformer) + memory_of(built.transformer_2)
    assert of[variants.PATCHED]["weights"] < 0.6 * of[variants.UNPATCHED]["weights"]
    assert all(variant["timings"]["text_encoding"] > 0 for variant in of.values())
    assert 1e-3 < of[variants.PATCHED]["latents"]["relative_l2"] < 5e-2


def test_block_sparse_attention_on_unstructured_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(end_to_end, "add_structure", None)  # is not called
    json_path = tmp_path / "benchmark.json"
    options = ["--config", "tiny", "--layers", "1", "--steps", "1", "--repeats", "1", "--no-compile", "--unstructured"]
    assert end_to_end.main([*options, "--preset", "block_sparse", "--json", str(json_path)]) == 0
    result = json.loads(json_path.read_text())
    assert "structured" not in result["settings"]
    assert [variant["name"] for variant in result["variants"]][2:] == [variants.DENSE_PATCH, variants.PATCHED]


def test_a_whole_video_of_ltx2_has_its_sound(tmp_path, capsys):
    json_path = tmp_path / "benchmark.json"
    options = ["--config", "tiny-ltx2", "--layers", "1", "--steps", "1", "--repeats", "1", "--no-compile", "--decode"]
    assert end_to_end.main([*options, "--preset", "sparse", "--json", str(json_path)]) == 0
    result = json.loads(json_path.read_text())
    assert [variant["name"] for variant in result["variants"]] == [
        *(variants.UNPATCHED, variants.EXACT_PATCH, variants.PATCHED)
    ]
    for variant in result["variants"]:
        timings = variant["timings"]
        assert timings["sound"] > 0
        assert timings["total"] > sum(timings["steps"]) + timings["vae_decode"] + timings["output"] + timings["sound"]
    assert result["variants"][-1]["frames"]["psnr_db"] > 0
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert printed.index("output") + 1 == printed.index("sound") == printed.index("total") - 1
