import pytest
import torch

from turbo_rcm_patch.kernels import attention_hopper, conv_hopper, gemm_hopper, gluon_names
from turbo_rcm_patch.kernels.dispatch import HOPPER


@pytest.fixture(autouse=True)
def _gluon_of_any_triton(monkeypatch):
    """Without a GPU nothing is compiled: what is asked about the sm_90 kernels is the same with every Triton."""
    if not torch.cuda.is_available() and gluon_names.why_not_this_triton() is not None:
        for module in (attention_hopper, conv_hopper, gemm_hopper):
            monkeypatch.setattr(module, "GLUON_ERROR", None)


@pytest.fixture
def sm_90():
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a GPU of sm_90")
    return torch.device("cuda")
