import pytest
import torch

from turbo_rcm_patch.kernels.dispatch import HOPPER


@pytest.fixture
def sm_90():
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a GPU of sm_90")
    return torch.device("cuda")
