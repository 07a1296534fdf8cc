import pytest
import triton

from turbo_rcm_patch.kernels.sizes import cdiv, next_power_of_2


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 127, 128, 32760])
def test_sizes_are_tritons_own(size):
    assert next_power_of_2(size) == triton.next_power_of_2(size)
    assert [cdiv(size, part) for part in (1, 2, 48, 128)] == [triton.cdiv(size, part) for part in (1, 2, 48, 128)]
