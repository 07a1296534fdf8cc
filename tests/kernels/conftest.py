import pytest
import torch

from turbo_rcm_patch.kernels.dispatch import SM90


@pytest.fixture
def sm_90():
    if torch.cuda.get_device_capability() != SM90:
        pytest.skip("needs a GPU of sm_90")
    return torch.device("cuda")
