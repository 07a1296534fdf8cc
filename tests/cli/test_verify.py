"""`turbo-rcm verify`."""

import json

import pytest

from tests.bench.damage import damage_block
from tests.cli.running import TINY, error_of
from turbo_rcm_patch.bench import verify as verify_module
from turbo_rcm_patch.cli import main, pipelines


def test_verify_passes(tmp_path, capsys):
    assert main(["verify", *TINY, "--json", str(tmp_path / "verify.json")]) == 0
    assert "all 6 blocks and the VAE are within the allowed error" in capsys.readouterr().out
    assert json.loads((tmp_path / "verify.json").read_text())["ok"] is True


def test_verify_exits_with_1_and_names_the_wrong_block(capsys, monkeypatch):
    damage_block(monkeypatch, verify_module, "transformer.blocks.2", lambda output: output + 1e-4 * output.roll(1, -1))
    assert main(["verify", *TINY]) == 1
    printed = capsys.readouterr().out
    assert "transformer.blocks.2, step 1: difference" in printed
    assert "blocks.1, step" not in printed


def test_verify_builds_a_config(tmp_path, capsys):
    options = ["--config", "tiny", "--layers", "1", "--steps", "2", "--device", "cpu", "--dtype", "bfloat16"]
    assert main(["verify", *options, "--json", str(tmp_path / "verify.json")]) == 0
    assert "the block and the VAE are within the allowed error" in capsys.readouterr().out
    settings = json.loads((tmp_path / "verify.json").read_text())["settings"]
    assert settings | {"config": "tiny", "layers": 1, "model": None, "dtype": "bfloat16", "height": 32} == settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "wan3"], "--config wan3 is unknown; accepted are wan2.1-1.3b, wan2.1-14b, wan2.1-i2v-14b"),
        (["--config", "tiny", "--model", "x/y"], "leave --model out"),
        (["--config", "tiny", "--image", __file__], "leave --image out"),
        (["--config", "tiny", "a fox"], "leave a prompt out"),
        (["--config", "tiny", "--offload"], "leave --offload out"),
        (["--config", "tiny", "--layers", "0"], "--layers 0: give 1 or more"),
        (["--config", "wan2.2-5b", "--height", "720"], "--height 720 is not divisible by 32; try 704"),
        (["--layers", "2"], "--layers goes with --config"),
    ],
)
def test_wrong_options_of_verify(capsys, monkeypatch, options, message):
    monkeypatch.setattr(pipelines, "build_pipeline", lambda *args, **kwargs: pytest.fail("a model was built"))
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *args: pytest.fail("a model was loaded"))
    assert message in error_of(capsys, "verify", *options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_verify_passes_on_a_gpu(capsys, dtype):
    assert main(["verify", "--device", "cuda", "--dtype", dtype]) == 0, capsys.readouterr().out
