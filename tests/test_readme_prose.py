"""What the README says in words: its length, its links, and that its code runs."""

import re
from pathlib import Path

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline
from peft import LoraConfig

from tests.tiny_wan import tiny_wan_pipeline

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_it_is_read_in_ten_minutes():
    assert len(README.splitlines()) <= 220


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not link.startswith("https:") and not (ROOT / link).exists()] == []


@pytest.fixture
def tiny_videos(monkeypatch):
    """WanPipeline.from_pretrained gives tiny pipelines on the CPU, whose calls make tiny videos and LoRAs."""
    call = WanPipeline.__call__

    def small(self, *arguments, num_inference_steps=2, **options):
        options |= {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": num_inference_steps}
        return call(self, *arguments, **options)

    def add_lora(self, *arguments, **options):
        self.transformer.add_adapter(LoraConfig(target_modules=["to_q"], init_lora_weights=False))

    monkeypatch.setattr(WanPipeline, "__call__", small)
    monkeypatch.setattr(WanPipeline, "load_lora_weights", add_lora)
    monkeypatch.setattr(WanPipeline, "to", lambda self, device: self)
    monkeypatch.setattr(WanPipeline, "from_pretrained", lambda *arguments, **options: tiny_wan_pipeline("t2v"))


@pytest.mark.usefixtures("tiny_videos")
@pytest.mark.parametrize("index", range(1, len(BLOCKS)))
def test_code_runs_after_the_first_block(index):
    names = {}
    exec(BLOCKS[0], names)
    exec(BLOCKS[index], names)
    assert len(names["video"]) == 5
    assert "lora" not in "".join(names["pipe"].transformer.state_dict())


def test_unipc_as_the_readme_sets_it_takes_euler_steps():
    names = {}
    exec(next(line for line in README.splitlines() if line.startswith("euler = ")), names)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, **names["euler"])
    scheduler.set_timesteps(4)
    assert scheduler.timesteps.tolist() == [999, 937, 833, 625]
    start = torch.randn(1, 2, 3, 4, 5)
    sample, euler = start, start
    for sigma, following, t in zip(
        (1, 0.9375, 5 / 6, 0.625), (0.9375, 5 / 6, 0.625, 0), scheduler.timesteps, strict=True
    ):
        sample = scheduler.step(torch.sin(3 * sample), t, sample).prev_sample
        euler = euler + (following - sigma) * torch.sin(3 * euler)
    assert (sample - euler).norm() < 3e-3 * euler.norm()  # its sigmas are up to 1e-3 off
