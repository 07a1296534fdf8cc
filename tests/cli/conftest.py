from unittest import mock

import pytest
import torch

from tests.cli.running import ALLOCATOR
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.cli import commands, pipelines
from turbo_rcm_patch.cli.errors import CommandError
from turbo_rcm_patch.memory import plan
from turbo_rcm_patch.memory.choose import Placement


@pytest.fixture(scope="package")
def saved_models(tmp_path_factory):
    """Folders of saved pipelines: text to video, image to video, and two that cannot be used."""
    root = tmp_path_factory.mktemp("models")
    tiny_wan_pipeline("t2v").save_pretrained(root / "t2v")
    tiny_wan_pipeline("i2v").save_pretrained(root / "i2v")
    for name, index in (("flux", '{"_class_name": "FluxPipeline"}'), ("broken", "{"), ("listed", "[]")):
        (root / name).mkdir()
        (root / name / "model_index.json").write_text(index)
    (root / "empty").mkdir()
    return root


@pytest.fixture
def nothing_runs(monkeypatch):
    """The test fails if a command passes its checks."""
    monkeypatch.setattr(commands, "run", lambda arguments: pytest.fail("the command ran"))


@pytest.fixture
def stop_at(monkeypatch):
    """A function that lets commands stop where some of their work begins. The mock that it returns has the calls."""

    def stop(*works):
        work = mock.Mock(side_effect=CommandError("stopped"))
        for name in works:
            monkeypatch.setattr(commands, name, work)
        return work

    return stop


@pytest.fixture
def cpu_as_a_gpu(monkeypatch):
    """The commands take the CPU as the GPU whose memory --vram is."""
    for module in (commands, pipelines):
        monkeypatch.setattr(module, "choose_device", lambda arguments: torch.device("cpu"))
    monkeypatch.setenv(ALLOCATOR, "")  # so that it is put back
    monkeypatch.delenv(ALLOCATOR)


@pytest.fixture
def everything_streams(monkeypatch):
    """Let a plan stream all models that can."""
    monkeypatch.setattr(
        plan, "choose", lambda components, *_: Placement(frozenset(c.name for c in components if c.blocks), tiles=False)
    )
