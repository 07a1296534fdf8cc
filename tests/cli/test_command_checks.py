"""Every command refuses its wrong options and outputs in one line, before it loads or writes anything."""

import socket

import pytest

from tests.cli.running import CAPTION, TINY, error_of
from turbo_rcm_patch.cli import pipelines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fps", "0"], "--fps 0"),
        (["--vram", "8 GB", "--offload"], "--vram and --offload both say where the models are"),
        (["--vram", "8 GB", "--no-patch"], "leave --vram or --no-patch out"),
        (["--no-patch", "--preset", "quantized"], "--preset is about the patch; leave it or --no-patch out."),
        (["--no-patch", "--preset", "sparse", "--topk", "0.3"], "--topk is about the patch; leave it or --no-patch"),
        (["--no-patch", "--preset", "quantized", "--keep", "blocks.99"], "--keep is about the patch"),
        (["--tiny-vae", "tae.safetensors"], "--tiny-vae: tae.safetensors: no such file or folder"),
        (["--tiny-vae", __file__], "checks.py is not a file of weights; accepted are files ending in .safetens"),
        (["--vram", "8"], "--vram: '8' is no amount of memory; give a number with MB, GB, MiB or GiB"),
        (["-o", "no/such/folder/out.mp4"], "folder no/such/folder does not exist; create it first"),
        (["-o", "out.avi"], "give a name ending in .mp4"),
        (["--gpus", "0"], "--gpus 0: give 1 or more"),
        (["--gpus", "-2"], "--gpus -2: give 1 or more"),
        (["--gpus", "3"], "--gpus 3: the model has 4 attention heads; give one of 2, 4."),
        (["--gpus", "2", "--device", "cpu"], "leave --device cpu out"),
        (["--gpus", "2", "--device", "cuda:1"], "leave --device cuda:1 out"),
        (["--gpus", "2", "--vram", "8GB"], "leave --vram out"),
        (["--gpus", "2", "--offload"], "leave --offload out"),
    ],
)
def test_wrong_options_of_generate(tmp_path, capsys, nothing_runs, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, "generate", CAPTION, "-o", "out.mp4", *options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "argv",
    [
        ["verify", "--preset", "quantized", "--json", "one.json", "--keep-out", "{}/one.json"],
        ["compare", "--plot", "one.png", "--video", "{}/one.png"],
    ],
)
def test_two_outputs_in_one_file(tmp_path, capsys, nothing_runs, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    line = error_of(capsys, *[text.format(tmp_path) for text in argv], *TINY)
    assert f"{argv[-4]} and {argv[-2]} are both one." in line
    assert "give each a file of its own" in line


def test_no_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "turbo_rcm_patch[plot]" in error_of(capsys, "compare", *TINY, "--plot", tmp_path / "out.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "1,5"], "--steps 5: the sampler takes 1 to 4 steps"),
        (["-n", "0"], "-n 0: give 1 or more"),
        (["--batch-size", "-1"], "--batch-size -1: give 1 or more"),
        (["--preset", "fastest"], "preset 'fastest' is unknown"),
        (["--height", "100"], "--height 100 is not divisible by 16"),
        (["--json", "out.txt"], "give a name ending in .json"),
    ],
)
def test_wrong_options_of_evaluate(capsys, nothing_runs, options, message):
    assert message in error_of(capsys, "evaluate", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "wan3"], "--config wan3 is unknown; accepted are wan2.1-1.3b, wan2.1-14b, wan2.1-i2v-14b"),
        (["--config", "tiny", "--model", "x/y"], "leave --model out"),
        (["--config", "tiny", "--image", __file__], "leave --image out"),
        (["--config", "tiny", "a fox"], "leave a prompt out"),
        (["--config", "tiny", "--offload"], "leave --offload out"),
        (["--config", "tiny", "--vram", "8GB"], "leave --vram out"),
        (["--config", "tiny", "--layers", "0"], "--layers 0: give 1 or more"),
        (["--config", "wan2.1-1.3b", "--layers", "31"], "--layers 31: wan2.1-1.3b has 30 blocks; give at most 30."),
        (["--config", "wan3", "--layers", "31"], "--config wan3 is unknown"),
        (["--config", "wan2.2-5b", "--height", "720"], "--height 720 is not divisible by 32; try 704"),
        (["--config", "ltx2-19b", "--frames", "6"], "--frames 6 is not 8k+1; try 9."),
        (["--config", "ltx2-19b", "--vae", "8bit"], "is a LTX2Pipeline; --vae is for Wan models, leave it out."),
        (["--config", "ltx2-19b-image", "--sigma-max", "80"], "Pipeline; --sigma-max is for Wan models, leave it out."),
        (["--layers", "2"], "--layers goes with --config"),
    ],
)
def test_wrong_options_of_verify(capsys, monkeypatch, options, message):
    monkeypatch.setattr(pipelines, "build_pipeline", lambda *args, **kwargs: pytest.fail("a model was built"))
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *args: pytest.fail("a model was loaded"))
    assert message in error_of(capsys, "verify", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "./nowhere"], "--model ./nowhere: no such folder"),
        (["--lora", "./nowhere.safetensors"], "--lora ./nowhere.safetensors: no such file"),
        (["--lora", "org/name"], "--lora goes with --model; the embedded model takes none"),
        (["--port", "70000"], "--port 70000: give a number from 1 to 65535"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 7860: Cannot assign requested address; choose"),
        (["--max-pixels", "0"], "--max-pixels 0: give 1 or more"),
        (["--device", "tpu"], "--device tpu is unknown"),
    ],
)
def test_wrong_options_of_demo(capsys, options, message):
    pytest.importorskip("gradio")
    assert message in error_of(capsys, "demo", *options)


def test_a_port_that_is_taken(capsys):
    pytest.importorskip("gradio")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}: Address already in use; choose" in error_of(capsys, "demo", "--port", port)


def test_without_gradio_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'turbo_rcm_patch[demo]'" in error_of(capsys, "demo")
