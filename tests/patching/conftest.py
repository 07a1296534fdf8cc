import pytest
import torch

from tests.patching.tape import TAPES, VARIANTS, TapeRecorder, make_models
from turbo_rcm_patch.patching import cuda_graphs as graphs


@pytest.fixture
def tape(monkeypatch):
    TAPES.clear()
    monkeypatch.setattr(graphs, "CudaRecorder", TapeRecorder)


@pytest.fixture(params=VARIANTS)
def models(request, tape):
    """The same model twice, patched with graphs and without; their weights are separate."""
    return make_models(VARIANTS[request.param][0], layers=2), VARIANTS[request.param][1]


@pytest.fixture
def saved(tmp_path):
    def save(state_dict, name="TurboWan.pth"):
        torch.save(state_dict, tmp_path / name)
        return tmp_path / name

    return save
