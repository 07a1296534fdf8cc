"""The examples run as a user runs them."""

import ast
import re
import runpy
import sys
from pathlib import Path

import imageio.v3 as iio
import pytest
import torch
from diffusers import WanPipeline

import turbo_rcm_patch
from tests import lora_files
from tests.cli.test_ltx2 import sound_in
from tests.official_ltx2 import ltx2_state_dict
from tests.official_names import official_state_dict, with_proj_l
from tests.tiny_ltx2 import tiny_ltx2_pipeline_for_prompts
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch import embedded

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run_example(monkeypatch, tmp_path):
    """Run a file as a script with arguments, in an empty folder."""

    def run(path, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(str(ROOT / path), run_name="__main__")

    return run


def test_generate(run_example, tmp_path, capsys):
    run_example("examples/generate.py", "--output", "out.mp4", "--size", "32", "48", "5")
    assert iio.imread(tmp_path / "out.mp4").shape == (5, 32, 48, 3)
    assert "6 blocks" in capsys.readouterr().out


def test_generate_runs_a_model_on_the_cpu_if_there_is_no_gpu(run_example, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tiny_wan_pipeline().save_pretrained(tmp_path / "model")
    size = ["--size", "32", "48", "5"]
    run_example("examples/generate.py", "--model", str(tmp_path / "model"), "--output", "out.mp4", *size)
    assert iio.imread(tmp_path / "out.mp4").shape == (5, 32, 48, 3)


@pytest.mark.parametrize("example", ["generate", "patch_pipeline"])
def test_the_tiny_model_is_loaded_on_the_gpu_if_there_is_one(run_example, monkeypatch, example):
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        turbo_rcm_patch, "load_embedded_pipeline", lambda device: devices.append(device) or sys.exit("loaded")
    )
    with pytest.raises(SystemExit, match="loaded"):
        run_example(f"examples/{example}.py")
    assert devices == ["cuda"]


def test_patch_pipeline(run_example, capsys):
    run_example("examples/patch_pipeline.py")
    *_, patched, partly, restored = capsys.readouterr().out.splitlines()
    assert float(patched.split(":")[1]) < 1e-3
    assert float(partly.split(":")[1]) < 1e-3
    assert restored == "bitwise the same after restore: True"


def test_demo(run_example, tmp_path, capsys, monkeypatch):
    call = WanPipeline.__call__

    def small(self, *arguments, **options):
        return call(self, *arguments, **options | {"height": 32, "width": 48})

    monkeypatch.setattr(WanPipeline, "__call__", small)
    run_example("examples/demo.py")
    printed = capsys.readouterr().out
    forms = ("the skip as a pass of its own", "written out in plain torch", "the skip in the projection's epilogue")
    apart = re.findall(r"   (.+?) +output (\S+) and gradient (\S+) from the first; at t = 0 x itself", printed)
    assert tuple(form for form, *_ in apart) == forms
    assert max(float(figure) for _, *figures in apart for figure in figures) < (
        5e-3 if torch.cuda.is_available() else 1e-5
    )
    moved = re.findall(r"   (.+?) +(\d+) MB", printed)
    assert tuple(form for form, _ in moved) == forms
    two_pass, plain, fused = (int(size) for _, size in moved)
    assert 0 < fused < two_pass < plain
    assert "two_pass" not in printed  # nor any other name of an implementation
    assert "6 blocks" in printed
    assert iio.imread(tmp_path / "demo.png").shape == (32, 5 * 48, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there kernels are compiled")
def test_demo_says_which_numpy_the_interpreter_takes(run_example, monkeypatch):
    installed = {"triton": "3.6.0", "numpy": "2.4.6"}
    monkeypatch.setattr("importlib.metadata.version", installed.get)
    with pytest.raises(SystemExit, match=r'numpy 2\.4\.6: pip install "numpy<2\.4"'):
        run_example("examples/demo.py")


@pytest.mark.parametrize("vram", [None, "8GB"])
def test_turbowan(run_example, tmp_path, capsys, monkeypatch, vram):
    planned = []
    monkeypatch.setattr(turbo_rcm_patch, "fit", lambda pipe, *given, **size: planned.append((*given, *size.values())))
    pipe = tiny_wan_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    torch.save(with_proj_l(official_state_dict(pipe.transformer), pipe.transformer), tmp_path / "TurboWan.pth")
    options = ["--model", str(tmp_path / "model"), "--size", "32", "48", "5", "--output", "out.mp4"]
    run_example("examples/turbowan.py", str(tmp_path / "TurboWan.pth"), *options, *(["--vram", vram] if vram else []))
    assert planned == ([(vram, 32, 48, 5)] if vram else [])
    assert iio.imread(tmp_path / "out.mp4").shape == (5, 32, 48, 3)
    assert "SLA 1/1 blocks" in capsys.readouterr().out  # of 12 tokens


def test_turbowan_from_an_image(run_example, tmp_path, capsys):
    """The script takes two files, one for each expert. With one file, or without an image, its error says so."""
    pipe = tiny_wan_pipeline("wan22_i2v")
    pipe.save_pretrained(tmp_path / "model")
    files = [tmp_path / f"{name}.pth" for name in ("high", "low")]
    for path, model in zip(files, (pipe.transformer, pipe.transformer_2), strict=True):
        torch.save(with_proj_l(official_state_dict(model), model), path)
    iio.imwrite(tmp_path / "fox.png", torch.full((64, 80, 3), 128, dtype=torch.uint8).numpy())
    options = ["--model", str(tmp_path / "model"), "--size", "32", "48", "5", "--output", "out.mp4"]
    run_example("examples/turbowan.py", *map(str, files), *options, "--image", str(tmp_path / "fox.png"))
    assert iio.imread(tmp_path / "out.mp4").shape == (5, 32, 48, 3)
    printed = capsys.readouterr().out
    assert printed.count("SLA") >= 2
    assert "transformer_2: WanTransformer3DModel" in printed
    for given in (map(str, files), [str(files[0]), "--image", "fox.png"]):
        with pytest.raises(SystemExit):
            run_example("examples/turbowan.py", *given, *options)
        assert "two files of weights, high and low, and --image" in capsys.readouterr().err


def test_turbot2av(run_example, tmp_path, capsys):
    pipe = tiny_ltx2_pipeline_for_prompts()
    pipe.save_pretrained(tmp_path / "model")
    torch.save({"generator": ltx2_state_dict(pipe.transformer, prefix="model.")}, tmp_path / "model.pth")
    options = ["--model", str(tmp_path / "model"), "--size", "64", "96", "9", "--output", "out.mp4"]
    run_example("examples/turbot2av.py", str(tmp_path / "model.pth"), *options, "--attention", "sagesla")
    assert iio.imread(tmp_path / "out.mp4").shape == (9, 64, 96, 3)
    assert imageio_ffmpeg.count_frames_and_secs(tmp_path / "out.mp4")[0] == 9
    assert sound_in(tmp_path / "out.mp4", tmp_path)[0].shape[1] == 2
    assert "SLA 1/2 blocks, no linear part" in capsys.readouterr().out  # of 108 tokens


def test_lightning(run_example, tmp_path, capsys):
    pipe = tiny_wan_pipeline("wan22")
    pipe.save_pretrained(tmp_path / "model")
    loras = [tmp_path / f"lightning/{name}_noise_model.safetensors" for name in ("high", "low")]
    loras[0].parent.mkdir()
    for path, model in zip(loras, (pipe.transformer, pipe.transformer_2), strict=True):
        lora_files.lightning(model).save(path)
    options = ["--model", str(tmp_path / "model"), "--size", "32", "48", "5", "--output", "out.mp4"]
    run_example("examples/lightning.py", *options, "--loras", *map(str, loras))
    assert iio.imread(tmp_path / "out.mp4").shape == (5, 32, 48, 3)
    printed = capsys.readouterr().out
    assert "lightning (named lightning): 4 steps (euler)" in printed
    assert "transformer_2: low_noise_model.safetensors, 20 linears of rank 64" in printed
    assert "+ LoRA" in printed


@pytest.mark.parametrize(
    "example", [["generate", "--model", "nobody/nothing"], ["turbowan", __file__], ["turbot2av", __file__]]
)
def test_examples_end_in_a_line_without_network(run_example, monkeypatch, example):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match=r"^cannot load .+: the hub cannot be reached, and this machine has no copy"):
        run_example(f"examples/{example[0]}.py", *example[1:])


@pytest.mark.parametrize("example", ["generate", "lightning", "parallel", "turbowan", "turbot2av"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--output", "no/out.mp4"], "--output no/out.mp4: the folder no does not exist; create it first."),
        (["--output", "out.avi"], "--output out.avi: give a name ending in .mp4."),
        (["--size", "100", "96", "17"], "--size: height 100 is not divisible by "),
        (["--size", "64", "96", "16"], "--size: frames 16 is not "),
    ],
)
def test_a_wrong_output_or_size_is_a_usage_error(run_example, capsys, example, wrong, message):
    """It comes before the weights are looked for, or a model is loaded."""
    with pytest.raises(SystemExit, match="2"):
        run_example(f"examples/{example}.py", *(["w.pth"] if "turbo" in example else []), *wrong)
    assert f"error: {message}" in capsys.readouterr().err


def test_ltx2s_sizes_are_those_of_its_vae(run_example, capsys):
    for size, message in (
        (["80", "96", "9"], "height 80 is not divisible by 32; try 64"),
        (["64", "96", "13"], "frames 13 is not 8k+1; try 17"),
    ):
        with pytest.raises(SystemExit):
            run_example("examples/turbot2av.py", "w.pth", "--size", *size)
        assert f"error: --size: {message}." in capsys.readouterr().err


@pytest.mark.parametrize("example", ["turbowan", "turbot2av"])
def test_missing_weights_are_an_error_before_any_download(run_example, capsys, example):
    with pytest.raises(SystemExit):
        run_example(f"examples/{example}.py", "model.pth")
    assert "model.pth: no such file; download Turbo" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_prints_nothing_of_other_packages_imports(path):
    """It imports them within quiet_imports(). tests/test_imports.py looks at what that prints."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for module in [getattr(statement, "module", None) or alias.name for alias in statement.names]:
                is_noisy = module.split(".")[0] in ("torch", "diffusers", "scripts", "turbo_rcm_patch")
                assert not is_noisy or module.startswith("turbo_rcm_patch.cli."), module


def test_generate_makes_a_video_of_the_size_that_the_tiny_model_has_learned(run_example, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(WanPipeline, "__call__", lambda self, *_, **options: calls.append(options) or sys.exit())
    with pytest.raises(SystemExit):
        run_example("examples/generate.py")
    size = (embedded.HEIGHT, embedded.WIDTH, embedded.FRAMES)
    assert tuple(calls[0][name] for name in ("height", "width", "num_frames")) == size


@pytest.mark.parametrize("name", ["lightning", "turbowan", "turbot2av"])
def test_examples_load_the_vae_in_the_dtype_of_the_kernels(name):
    assert "float32" not in (ROOT / f"examples/{name}.py").read_text()
