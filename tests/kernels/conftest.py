import pytest
import torch

from turbo_rcm_patch.kernels.dispatch import SM90


@pytest.fixture
def sm_90():
    if torch.cuda.get_device_capability() != SM90:
        pytest.skip("needs a GPU of sm_90")
    return torch.device("cuda")


@pytest.fixture
def uninitialised_memory_is_nan():
    """torch.empty gives NaN: a row that a kernel forgets, or reads before it is written, shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
