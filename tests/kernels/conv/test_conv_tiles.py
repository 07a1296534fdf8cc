"""The tiles of the portable convolution: every size against the oracle, and the sizes chosen for the decoder."""

import pytest
import torch

from tests.kernels.conv.test_conv_skip import check, operands
from tests.oracle import torch_device
from turbo_rcm_patch.kernels.conv import conv_portable, conv_tiles


def tile_cases():
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    for C, N in ((16, 256), (40, 192), (16, 128), (96, 96), (16, 64), (24, 32), (64, 16), (20, 64)):
        for dtype in (torch.float16, torch.float32):
            descriptors = capability >= (9, 0) and dtype == torch.float16 and C % 8 == 0
            yield pytest.param(capability, dtype, descriptors, C, N, id=f"{C}-{N}-{dtype}")


@pytest.mark.parametrize(("capability", "dtype", "descriptors", "C", "N"), list(tile_cases()))
def test_every_tile(capability, dtype, descriptors, C, N, device):
    tiles = conv_tiles.choose_conv_tiles(capability, dtype, descriptors, 3, 9, C, N)
    N += tiles.columns // 2 + tiles.tail // 2  # a second tile, which is cut
    check(operands(1, 1, 3, 9, C, N, 1, 3, torch_device(device), dtype))


@pytest.mark.parametrize("box", [(8, 16), (16, 8), (1, 128)])
@pytest.mark.parametrize("C", [16, 12])
def test_every_box(box, C, device, monkeypatch):
    """Two boxes down and two across. The last ones are cut. TMA reads them too."""
    choose = conv_portable.choose_conv_tiles

    def with_box(*arguments):
        tiles = choose(*arguments)
        return type(tiles)(**vars(tiles) | {"box_height": box[0], "box_width": box[1]})

    monkeypatch.setattr(conv_portable, "choose_conv_tiles", with_box)
    tensors = operands(1, 1, box[0] + 1, box[1] + 3, C, 12, 1, 3, torch_device(device), torch.float16)
    check(tensors)
    check([*tensors[:3], None], upsample=True)


def test_columns_of_known_sizes():
    choose = conv_tiles.choose_columns
    chosen = {N: choose(N, conv_tiles._WGMMA_COLUMNS) for N in (3, 12, 96, 128, 160, 192, 256, 384, 768, 1024)}
    assert chosen == {
        **{3: (16, 0), 12: (16, 0), 96: (64, 32), 128: (128, 0), 160: (128, 64), 192: (128, 64)},
        **{256: (256, 0), 384: (128, 64), 768: (256, 0), 1024: (256, 0)},
    }


def test_steps_add_no_channels_that_smaller_ones_would_not():
    depths = {C: conv_tiles.choose_depth(C, 64) for C in (1, 16, 24, 48, 64, 96, 160, 192, 384)}
    assert depths == {1: 16, 16: 16, 24: 32, 48: 16, 64: 64, 96: 32, 160: 32, 192: 64, 384: 64}
    assert conv_tiles.choose_depth(384, 32) == 32


def test_boxes_cover_the_decoders_images():
    assert conv_tiles.choose_box(60, 104, 128) == (16, 8)
    assert conv_tiles.choose_box(120, 208, 128) == (8, 16)
    assert conv_tiles.choose_box(480, 832, 128) == (8, 16)
    assert conv_tiles.choose_box(1, 6240, 128) == (1, 128)
