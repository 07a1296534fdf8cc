import pytest
import torch

from turbo_rcm_patch.kernels import gemm_hopper


@pytest.fixture
def sm_90():
    if torch.cuda.get_device_capability() != gemm_hopper.CAPABILITY:
        pytest.skip("needs a GPU of sm_90")
    return torch.device("cuda")
