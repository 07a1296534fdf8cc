import torch

from turbo_rcm_patch.kernels.tma import head_strides, heads_fit_tma, matrix_fits_tma


def test_matrices():
    matrix = torch.zeros(16, 32, dtype=torch.bfloat16)
    assert matrix_fits_tma(matrix)
    assert matrix_fits_tma(matrix[:, :20])  # rows are as far apart as before
    assert not matrix_fits_tma(matrix[:, 1:])
    assert not matrix_fits_tma(matrix.T)
    assert not matrix_fits_tma(matrix[:, ::2])  # its rows are not packed
    assert not matrix_fits_tma(matrix[:1].expand(16, 32))
    assert not matrix_fits_tma(torch.zeros(16, 20, dtype=torch.bfloat16))


def test_heads():
    x = torch.zeros(2, 5, 3, 64, dtype=torch.bfloat16)
    assert heads_fit_tma(x)
    assert heads_fit_tma(x.transpose(1, 2))
    assert not heads_fit_tma(x[..., 1:])
    assert not heads_fit_tma(x.transpose(2, 3))
    assert not heads_fit_tma(x[..., ::2])
    assert not heads_fit_tma(x[:, :1].expand(2, 5, 3, 64))
    assert not heads_fit_tma(torch.zeros(2, 5, 3, 60, dtype=torch.bfloat16))


def test_a_dimension_of_size_1_has_the_packed_stride():
    x = torch.zeros(1, 5, 1, 64).as_strided((1, 5, 1, 64), (7, 64, 3, 1))
    assert head_strides(x) == (5 * 64, 64, 64)
    assert head_strides(None) == (0, 0, 0)
