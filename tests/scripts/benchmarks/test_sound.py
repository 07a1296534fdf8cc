"""scripts/benchmarks/sound.py: the sound's share of a step."""

import argparse
import json

import pytest
import torch

from scripts.benchmarks import sound
from scripts.tools.pages.sound import sound_table
from turbo_rcm_patch.patching.families.ltx2.sub_layers import BlockPlan

ROWS = [(tier, graphs) for tier in sound.TIERS for graphs in ("off", "on")]


def test_each_tier_is_timed_whole_and_with_the_video_alone(monkeypatch):
    """With the video alone its hidden states are the same but for what the sound would have changed."""
    monkeypatch.setattr(sound, "ROUNDS", 1)
    options = argparse.Namespace(config="tiny-ltx2", layers=1, height=None, width=None, frames=None)
    seen, run = [], BlockPlan.run

    def timed(call):
        seen.append((BlockPlan.run is run, call()))
        return 3.0 if BlockPlan.run is run else 2.75

    rows = sound.measure(options, torch.device("cpu"), timed)
    assert [(row["preset"], row["cuda_graph"]) for row in rows] == ROWS
    assert all((row["step"], row["video_alone"]) == (3.0, 2.75) for row in rows)
    assert BlockPlan.run is run
    (whole, (video, audio)), (alone, (other_video, other_audio)) = seen[:2]
    assert (whole, alone) == (True, False)
    assert not torch.equal(audio, other_audio)
    assert 0 < (video - other_video).norm() < 0.5 * video.norm()


def test_the_page_shows_the_share_and_what_is_too_much():
    rows = [
        {"preset": "exact", "cuda_graph": "off", "step": 50.0, "video_alone": 30.0},
        {"preset": "exact", "cuda_graph": "on", "step": 40.0, "video_alone": 38.0},
        {"preset": "sparse", "cuda_graph": "on", "step": 10.0, "video_alone": 8.0},
    ]
    settings = {"config": "ltx2-19b", "layers": 8, "height": 512, "width": 768, "num_frames": 121}
    text = sound_table({"settings": settings, "sound": rows})
    assert "ltx2-19b (8 layers), 121×512×768" in text
    assert "| exact | off | 50.0 | 30.0 | 40.0 |" in text  # graphs are faster
    assert "| exact | on | 40.0 | 38.0 | 5.0 |" in text
    assert "| sparse | on | 10.0 | 8.0 | 20.0 ✗ |" in text


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tmp_path / "sound.json"
    assert sound.main(["--config", "tiny-ltx2", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["sound"]
    assert [(row["preset"], row["cuda_graph"]) for row in rows] == ROWS
    assert all(min(row["step"], row["video_alone"]) > 0 for row in rows)  # other tests share the GPU: no order of times
