"""scripts/training/train_lora.py: a few updates, and the counts of every variant."""

import json

import pytest
import torch

from scripts.training import train_lora

SMALL = {"height": 32, "width": 48, "num_frames": 5, "guidance_scale": 1.0}


@pytest.mark.filterwarnings("ignore:.*fewer than")
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_updates_change_what_is_painted_and_every_variant_is_counted(where, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_lora, "EMBEDDED_CALL", SMALL)
    options = ["--output", str(tmp_path / "lora"), "--json", str(tmp_path / "lora.json"), "--device", where]
    assert train_lora.main([*options, "--updates", "2", "-n", "2"]) == 0
    report = json.loads((tmp_path / "lora.json").read_text())
    assert report["settings"]["colour"] == "red"
    assert report["training"]["updates"] == 2
    without, unpatched, *patched = report["results"]
    assert (without["variant"], without["psnr"], unpatched["psnr"]) == ("without it, unpatched", None, None)
    assert [row["variant"] for row in patched] == ["with it, patched (exact)", "with it, patched (quantized)"]
    exact, quantized = (row["psnr"] for row in patched)
    assert exact > (60 if where == "cpu" else 30)  # in bf16 on a GPU
    assert exact > quantized > (20 if where == "cpu" else 15)
    assert capsys.readouterr().out.count("as asked") == 4


def test_the_teacher_is_asked_for_the_same_in_red():
    scenes = train_lora.scenes_to_paint(0, held_out=True)
    for scene in (next(scenes) for _ in range(20)):
        (shape,), (painted,) = scene.objects, train_lora.in_colour(scene).objects
        assert shape.colour != "red" == painted.colour
        assert str(train_lora.in_colour(scene)) == str(scene).replace(f"an {shape.colour}", "a red").replace(
            shape.colour, "red"
        )


def test_gradients_reach_the_lora_alone():
    pipe = train_lora.load("cpu", torch.float32)
    student = train_lora.with_lora(pipe.transformer)
    learned = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert learned
    assert all(".lora_" in name for name in learned)
