"""`turbo-rcm generate`: the video it writes, and its warnings."""

import argparse
import json
import os
import re

import imageio.v3 as iio
import numpy as np
import pytest
import torch

import turbo_rcm_patch as trp
from tests.cli.running import ALLOCATOR, CAPTION, TINY, error_of
from tests.patching.tiny_vae.published import WIDTHS, tiny_file
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch import embedded
from turbo_rcm_patch.cli import commands, main, pipelines
from turbo_rcm_patch.cli.errors import CommandError
from turbo_rcm_patch.cli.files import write_video
from turbo_rcm_patch.patching.steps.plan import is_patched
from turbo_rcm_patch.patching.tiny_vae import network
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.shapes import grammar


def test_generate_writes_the_video_that_the_pipeline_makes(tmp_path, capsys):
    output = tmp_path / "circle.mp4"
    assert main(["generate", CAPTION, "-o", str(output), *TINY, "--seed", "7", "--fps", "8"]) == 0
    printed = capsys.readouterr().out
    stages = ("text encoding", "2 steps, ", "VAE decode", "output", "writing", "total, to the finished file")
    for text in (*stages, str(output)):
        assert text in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("patched (exact): "))
    if not torch.cuda.is_available():
        assert re.search(
            r": 0 of \d+ parts of its layers are fused \(why not the others: cpu tensors, .*\); -v shows", line
        )
    assert "WanTransformer3DModel" not in printed
    seconds = [seconds_of(printed, stage) for stage in stages]
    assert min(seconds) > 0
    assert sum(seconds[:-1]) <= seconds[-1] * 1.001  # rounded as they are printed
    assert [path.name for path in tmp_path.iterdir()] == ["circle.mp4"]

    pipe = trp.load_embedded_pipeline()
    trp.use_rcm(pipe)
    size = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 1.0}
    expected = pipe(CAPTION, generator=torch.Generator().manual_seed(7), **size).frames[0]
    frames = iio.imread(output) / 255
    assert frames.shape == expected.shape
    assert np.abs(frames - expected).mean() < 0.06  # what the mp4's compression leaves
    assert np.abs(frames[::-1] - expected).mean() > np.abs(frames - expected).mean()
    assert iio.immeta(output)["fps"] == 8


@pytest.mark.parametrize("variant", ["ti2v", "t2v"])
def test_a_video_plays_at_the_rate_of_its_model(variant, tmp_path):
    tiny_wan_pipeline(variant).save_pretrained(tmp_path / variant)
    output = tmp_path / "video.mp4"
    assert main(["generate", CAPTION, "-o", str(output), *TINY, "--model", str(tmp_path / variant)]) == 0
    assert iio.immeta(output)["fps"] == {"ti2v": 24, "t2v": 16}[variant]


def seconds_of(printed, stage):
    line = next(line for line in printed.splitlines() if line.strip().startswith(stage))
    value, unit = line.split()[-2:]
    return float(value) * {"s": 1, "ms": 1e-3}[unit]


def test_ffmpeg_gets_a_piece_before_the_next_is_made(tmp_path, monkeypatch):
    """Making and sending take turns over the frames that are written."""
    import imageio.v2

    events, get_writer = [], imageio.v2.get_writer

    def watched(*args, **options):
        writer = get_writer(*args, **options)
        append = writer.append_data
        writer.append_data = lambda frame: events.append("sent") or append(frame)
        return writer

    def pieces():
        for index in range(3):
            events.append("made")
            yield np.full((2, 32, 48, 3), 80 * index, np.uint8)

    monkeypatch.setattr(imageio.v2, "get_writer", watched)
    write_video(tmp_path / "grey.mp4", pieces(), fps=8)
    assert events == ["made", "sent", "sent"] * 3
    assert np.abs(iio.imread(tmp_path / "grey.mp4")[::2].mean((1, 2, 3)) - [0, 80, 160]).max() < 4


def test_generate_no_patch_and_a_saved_model(tmp_path, capsys, saved_models):
    outputs = [tmp_path / "patched.mp4", tmp_path / "plain.mp4"]
    model = ["--model", str(saved_models / "t2v")]
    assert main(["generate", "a fox", "-o", str(outputs[0]), *model, *TINY, "-v"]) == 0
    assert "self_attention" in capsys.readouterr().out
    assert main(["generate", "a fox", "-o", str(outputs[1]), *model, *TINY, "--no-patch"]) == 0
    assert "patched (" not in capsys.readouterr().out
    patched, plain = (iio.imread(output).astype(float) for output in outputs)
    assert np.abs(patched - plain).mean() < 1


def test_generate_with_a_tiny_vae(tmp_path, capsys, saved_models, monkeypatch):
    monkeypatch.setattr(network, "WIDTHS", WIDTHS)
    file, outputs = tiny_file(tmp_path), [tmp_path / "own.mp4", tmp_path / "tiny.mp4"]
    options = ["--model", str(saved_models / "t2v"), *TINY]
    assert main(["generate", "a fox", "-o", str(outputs[0]), *options]) == 0
    assert main(["generate", "a fox", "-o", str(outputs[1]), *options, "--tiny-vae", str(file)]) == 0
    own, tiny = (iio.imread(output).astype(float) for output in outputs)
    assert own.shape == tiny.shape
    assert np.abs(own - tiny).mean() > 5
    capsys.readouterr()
    other = tiny_file(tmp_path, "taew2_2")
    assert main(["generate", "a fox", "-o", str(outputs[1]), *options, "--tiny-vae", str(other)]) == 2
    assert "--tiny-vae: taew2_2.safetensors decodes latents of 48 channels" in capsys.readouterr().err


def test_generate_and_compare_with_a_vae_in_8_bits(tmp_path, capsys, saved_models):
    """On a CPU the frames are exact, and the summary says why."""
    options = ["--model", str(saved_models / "t2v"), *TINY]
    generate = ["generate", "a fox", "-o", str(tmp_path / "out.mp4"), *options, "--vae", "8bit"]
    figures = tmp_path / "out.json"
    for command in ([*generate, "-v"], ["compare", "a fox", *options, "--vae", "8bit", "--json", str(figures)]):
        assert main(command) == 0
        assert 'vae="8bit": convolutions stay' in capsys.readouterr().out
    assert json.loads(figures.read_text())["settings"]["vae"] == "8bit"
    for other in (["--no-patch"], ["--tiny-vae", "taew2_1.safetensors"]):
        assert main([*generate, *other]) == 2
        assert f"leave it or {other[0]} out" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "compare", "verify"])
def test_a_prompt_outside_the_grammar_is_warned_about(tmp_path, capsys, stop_at, command):
    """The warning comes before the command does its work."""
    stop_at("patch", "compare", "verify")
    options = ["-o", str(tmp_path / "fox.mp4")] if command == "generate" else []
    assert main([command, "a red fox leaps", *TINY, *options]) == 2
    warning = capsys.readouterr().err
    assert f"turbo-rcm {command}: warning: " in warning
    assert "'a red fox leaps'" in warning
    for text in (*grammar.EXAMPLES, *grammar.COLOURS, *grammar.SHAPES, *grammar.DIRECTIONS, *grammar.BACKGROUNDS):
        assert text in warning


def test_a_long_prompt_is_not_repeated_whole(capsys, stop_at):
    stop_at("verify")
    assert main(["verify", "a fox leaps " + 10_000 * "x", *TINY]) == 2
    warning = capsys.readouterr().err
    assert "unlike 'a fox leaps xxx" in warning
    assert len(warning) < 1500


def test_no_warning_for_a_caption_a_default_or_another_model(capsys, stop_at, saved_models):
    verify = stop_at("verify")
    for options in (["A large blue square moves UP on white"], [], ["--model", saved_models / "t2v"]):
        assert main(["verify", *map(str, options), *TINY]) == 2
    prompts = [call["prompt"] for (_, call), _ in verify.call_args_list]
    assert prompts == ["A large blue square moves UP on white", grammar.EXAMPLES[0], pipelines.DEFAULT_PROMPT]
    assert "learned captions" not in capsys.readouterr().err


def test_another_size_than_the_learned_one_is_warned_about(capsys, stop_at, saved_models):
    def warnings(*argv):
        stop_at("verify")
        assert main(["verify", "--device", "cpu", *map(str, argv)]) == 2
        return [line for line in capsys.readouterr().err.splitlines() if "learned videos" in line]

    (warning,) = warnings("--height", "32", "--frames", "5")
    assert f"{embedded.HEIGHT}x{embedded.WIDTH} pixels and {embedded.FRAMES} frames" in warning
    assert f"at 32x{embedded.WIDTH} and 5" in warning
    assert warnings() == []
    assert warnings("--height", embedded.HEIGHT, "--width", embedded.WIDTH) == []
    assert warnings("--model", saved_models / "t2v", *TINY) == []


def test_help_names_the_size_of_the_embedded_model(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    printed = capsys.readouterr().out
    for size in (embedded.HEIGHT, embedded.WIDTH, embedded.FRAMES):
        assert f"embedded model {size})" in " ".join(printed.split())


def test_an_old_video_is_replaced_only_by_a_whole_one(tmp_path, capsys, monkeypatch):
    output = tmp_path / "circle.mp4"
    output.write_bytes(b"old")

    def disk_full(path, **options):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("imageio.v2.get_writer", disk_full)
    assert "No space left on device" in error_of(capsys, "generate", CAPTION, "-o", output, *TINY)
    assert output.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["circle.mp4"]


@pytest.mark.usefixtures("cpu_as_a_gpu")
def test_generate_with_vram_patches_and_then_fits(saved_models, tmp_path, capsys, monkeypatch):
    seen, fit = [], commands.fit_with
    monkeypatch.setattr(commands, "fit_with", lambda pipe, *args: seen.append(pipe) or fit(pipe, *args))
    options = ["generate", CAPTION, *TINY[:-2], "--preset", "quantized", "--model", str(saved_models / "t2v")]
    assert main([*options, "-o", str(tmp_path / "fitted.mp4"), "--vram", "10GB"]) == 0
    printed = capsys.readouterr().out
    (pipe,) = seen
    assert is_patched(pipe.transformer.blocks[0])
    assert "48x32, 5 frames, within 9.40 GB beside CUDA's own 0.60 GB" in printed
    assert "original weights for restore()" not in printed  # they are freed
    assert all(linear.is_freed for linear in quantized_linears(pipe.transformer))
    assert os.environ[ALLOCATOR] == "expandable_segments:True"
    assert main([*options, "-o", str(tmp_path / "plain.mp4")]) == 0
    fitted, plain = (iio.imread(tmp_path / f"{name}.mp4") for name in ("fitted", "plain"))
    assert np.array_equal(fitted, plain)


@pytest.mark.usefixtures("cpu_as_a_gpu")
@pytest.mark.parametrize("vram", [[], ["--vram", "10GB"]], ids=["", "vram"])
def test_generate_stores_the_text_encoder_in_8_bits(vram, tmp_path, capsys, monkeypatch):
    seen, generation = [], commands.timed_generation
    monkeypatch.setattr(
        commands, "timed_generation", lambda pipe, **call: seen.append(pipe) or generation(pipe, **call)
    )
    options = ["generate", CAPTION, *TINY[:-2], "-o", str(tmp_path / "x.mp4"), "--text-encoder", "8bit", *vram]
    assert main(options) == 0
    linears = quantized_linears(seen[0].text_encoder)
    assert len(linears) == 3 * 7
    assert all(linear.is_freed for linear in linears)
    assert ("in 8 bits, stays on the GPU" in capsys.readouterr().out) == bool(vram)


@pytest.mark.usefixtures("cpu_as_a_gpu")
def test_weights_that_were_stored_in_8_bits_fit_too(saved_models, tmp_path, capsys):
    model, converted = str(saved_models / "t2v"), str(tmp_path / "converted")
    assert main(["convert", model, converted, "--device", "cpu", "--dtype", "float32"]) == 0
    options = [*TINY[:-2], "--preset", "quantized", "--model", model, "--transformer", converted]
    assert main(["generate", CAPTION, "-o", str(tmp_path / "x.mp4"), *options, "--vram", "10GB"]) == 0
    printed = capsys.readouterr().out
    assert "within 9.40 GB" in printed
    assert "original weights" not in printed


@pytest.mark.usefixtures("cpu_as_a_gpu")
def test_too_little_vram_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(ALLOCATOR, "garbage_collection_threshold:0.8")
    message = error_of(capsys, "generate", CAPTION, "-o", tmp_path / "x.mp4", *TINY[:-2], "--vram", "610 MB")
    assert "--vram 610 MB: 48x32, 5 frames take at least" in message
    assert os.environ[ALLOCATOR] == "garbage_collection_threshold:0.8"
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_generate_with_vram_on_a_gpu(tmp_path, capsys):
    pytest.importorskip("imageio_ffmpeg")
    options = ["--device", "cuda", "--vram", "2GB", "--height", "32", "--width", "48", "--frames", "5"]
    assert main(["generate", CAPTION, "-o", str(tmp_path / "circle.mp4"), *options]) == 0
    assert "stays on the GPU" in capsys.readouterr().out
    assert iio.imread(tmp_path / "circle.mp4").shape == (5, 32, 48, 3)


@pytest.mark.gpu
def test_generate_with_offload(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    options = ["--device", "cuda", "--offload", "--height", "32", "--width", "48", "--frames", "5"]
    assert main(["generate", CAPTION, "-o", str(tmp_path / "circle.mp4"), *options]) == 0
    assert iio.imread(tmp_path / "circle.mp4").shape == (5, 32, 48, 3)


def test_offload_is_asked_for_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CommandError, match="this machine has 1 GPU, counted from cuda:0"):
        pipelines.choose_device(argparse.Namespace(device="cuda:1", offload=False))
    assert pipelines.choose_device(argparse.Namespace(device=None, offload=True)) == torch.device("cuda")
