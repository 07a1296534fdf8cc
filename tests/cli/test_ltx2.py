"""The commands on LTX-2: `generate` writes the video with its sound."""

import subprocess
import wave
from importlib.util import find_spec

import imageio.v3 as iio
import numpy as np
import pytest
import torch

import turbo_rcm_patch as trp
from tests.cli.running import error_of
from tests.official_ltx2 import ltx2_state_dict
from tests.official_names import official_state_dict
from tests.patching.tiny_vae.published import tiny_file
from tests.tiny_ltx2 import tiny_ltx2_pipeline_for_prompts
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.cli import commands, main
from turbo_rcm_patch.cli.files import Sound, write_video

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")

SIZE = {"height": 64, "width": 96, "num_frames": 5}
OPTIONS = ["--height", "64", "--width", "96", "--frames", "5", "--device", "cpu", "--seed", "7"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ltx2") / "model"
    tiny_ltx2_pipeline_for_prompts().save_pretrained(folder)
    return folder


def sound_in(path, folder):
    """The samples [n, channels] and the rate of an mp4's sound."""
    wav = folder / "sound.wav"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", path, "-map", "0:a:0", wav]
    subprocess.run(command, check=True)
    with wave.open(str(wav)) as opened:
        samples = np.frombuffer(opened.readframes(opened.getnframes()), "<i2").reshape(-1, opened.getnchannels())
        rate = opened.getframerate()
    wav.unlink()
    return samples / 32767, rate


def test_a_video_has_its_sound(tmp_path):
    time = np.arange(16000) / 16000
    tones = 0.5 * np.sin(2 * np.pi * np.array([[440.0], [880.0]]) * time)
    frames = np.zeros((24, 64, 64, 3), np.uint8)
    write_video(tmp_path / "tones.mp4", [frames], 24, Sound(tones, 16000))
    found, rate = sound_in(tmp_path / "tones.mp4", tmp_path)
    assert rate == 16000
    assert found.shape[1] == 2
    for channel, pitch in zip(found.T, (440, 880), strict=True):
        spectrum = np.abs(np.fft.rfft(channel[4000:12000]))
        assert spectrum.argmax() * 2 == pitch
        assert np.abs(channel[4000:12000]).max() == pytest.approx(0.5, abs=0.05)
    assert len(iio.imread(tmp_path / "tones.mp4")) == 24
    assert [path.name for path in tmp_path.iterdir()] == ["tones.mp4"]


@pytest.mark.parametrize(
    "options", [["--preset", "quantized", "--fps", "25"], ["--preset", "sparse", "--recipe", "turbot2av"]]
)
def test_generate_writes_the_video_with_its_sound(model, tmp_path, capsys, options, monkeypatch):
    output, written = tmp_path / "video.mp4", []
    monkeypatch.setattr(commands, "write_video", lambda *given: written.append(given[3]) or write_video(*given))
    steps = [] if "turbot2av" in options else ["--steps", "2"]
    assert (
        main(["generate", "a fox barks", "--model", str(model), "-o", str(output), *OPTIONS, *steps, *options, "-v"])
        == 0
    )
    printed = capsys.readouterr().out
    fps = 25 if "25" in options else 24
    assert f"5 frames of 96x64, {fps} per second" in printed
    assert "LTX2VideoTransformer3DModel" in printed

    pipe = tiny_ltx2_pipeline_for_prompts()
    call = {"num_inference_steps": 2}
    if "turbot2av" in options:
        assert "turbot2av (as asked for): 4 steps (sde) at timesteps 1000, 928, 852, 608" in printed
        trp.use_distilled(pipe, recipe="turbot2av")
        call = {"num_inference_steps": 4}
    else:
        assert "If it is distilled, give --recipe: turbot2av." in printed
    call |= {**SIZE, "guidance_scale": 3.0, "frame_rate": float(fps), "generator": torch.Generator().manual_seed(7)}
    video, sound = pipe("a fox barks", **call, output_type="np", return_dict=False)
    frames, (found, rate) = iio.imread(output) / 255, sound_in(output, tmp_path)
    assert frames.shape == video[0].shape
    assert written[0].samples == pytest.approx(sound[0].numpy(), abs=0.05 * sound.abs().max().item())
    assert ("no linear part" in printed) == ("sparse" in options)
    blocks = [x.mean(3).reshape(5, 8, 8, 12, 8).mean((2, 4)).ravel() for x in (frames, video[0], video[0][::-1])]
    same, reversed_ = np.corrcoef(blocks)[0, 1:]  # the rest is noise, which the mp4 does not keep
    assert same > 0.7
    assert same > reversed_ + 0.1
    assert iio.immeta(output)["fps"] == fps
    assert rate == pipe.vocoder.config.output_sampling_rate
    assert found.shape[1] == sound.shape[1]
    assert len(found) >= sound.shape[2]


def test_turbot2avs_file_takes_the_transformers_place(model, tmp_path, capsys):
    student, output = tiny_ltx2_pipeline_for_prompts(), tmp_path / "video.mp4"
    with torch.no_grad():
        student.transformer.proj_out.weight.mul_(2)
    path = tmp_path / "model.pth"
    torch.save({"generator": ltx2_state_dict(student.transformer, prefix="model.")}, path)
    options = ["--model", str(model), "--transformer", str(path), "--recipe", "turbot2av"]
    assert main(["generate", "a fox barks", *options, "-o", str(output), *OPTIONS, "-v"]) == 0
    assert "no linear part" not in capsys.readouterr().out
    assert len(iio.imread(output)) == 5
    torch.save({"generator": official_state_dict(tiny_wan_transformer())}, path)
    generate = ["generate", "a fox", *options, "-o", output, *OPTIONS]
    assert "holds weights of Wan, but the LTX2Video" in error_of(capsys, *generate)
    assert "run patched alone; it goes with generate, without --no-patch" in error_of(capsys, *generate, "--no-patch")


def test_its_projections_count_if_they_are_not_zero(model, tmp_path, capsys):
    """load_turbodiffusion counts them so."""
    path, weights = tmp_path / "model.pth", ltx2_state_dict(tiny_ltx2_pipeline_for_prompts().transformer)
    options = ["--model", model, "--transformer", path, *OPTIONS, "--steps", "1"]
    for number in range(2):
        name = f"transformer_blocks.{number}.attn1.attention_function.local_attn.proj_l"
        weights |= {f"{name}.weight": torch.zeros(64, 64), f"{name}.bias": torch.zeros(64)}
    torch.save(weights, path)
    generate = list(map(str, ["generate", "a fox barks", "-o", tmp_path / "video.mp4", *options]))
    assert main(generate) == 0
    weights[f"{name}.bias"] += 1
    torch.save(weights, path)
    assert "which --preset exact leaves out; give --preset sparse." in error_of(capsys, *generate)
    assert main([*generate, "--preset", "sparse"]) == 0


def test_advice_is_about_a_model_with_sound(model, tmp_path, capsys):
    target = tmp_path / "converted"
    assert main(["convert", str(model), str(target), "--preset", "sparse", "--device", "cpu"]) == 0
    assert "--recipe turbot2av" in capsys.readouterr().out
    assert main(["verify", "--model", str(model), *OPTIONS, "--steps", "1"]) == 0
    assert "no few-step distillation.\n" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "models"), [("generate", "Wan or LTX-2"), ("evaluate", "Wan")])
def test_help_names_the_models_of_a_command(command, models, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"a diffusers pipeline of {models} (default:" in " ".join(capsys.readouterr().out.split())


def test_other_commands(model, capsys, tmp_path, nothing_runs):
    vae_file = tiny_file(tmp_path)
    for command in ("evaluate", "demo") if find_spec("gradio") else ("evaluate",):
        line = error_of(capsys, command, "--model", model, "--device", "cpu")
        assert f"LTX2Pipeline; {command} takes Wan models" in line
    generate = ["generate", "a fox", "--model", model, "-o", tmp_path / "a.mp4", *OPTIONS]
    assert "--recipe rcm is not for a LTX2Pipeline" in error_of(capsys, *generate, "--recipe", "rcm")
    for command in (generate, ["compare", *generate[1:4]], ["verify", "--model", model]):
        assert "LTX2Pipeline; --vae is for Wan models" in error_of(capsys, *command, "--vae", "8bit")
    for option, value in (("--tiny-vae", vae_file), ("--text-encoder", "8bit"), ("--sigma-max", "80")):
        assert f"LTX2Pipeline; {option} is for Wan models, leave it out" in error_of(capsys, *generate, option, value)
    assert "--frames 6 is not" in error_of(capsys, *generate, "--frames", "6")
