from dataclasses import fields

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from turbo_rcm_patch.kernels.tma import descriptor_of, head_strides, heads_fit_tma, matrix_fits_tma


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


def test_a_descriptor_without_the_constructors_checks_is_the_same():
    matrix = torch.zeros(16, 32, dtype=torch.bfloat16)
    made = descriptor_of(TensorDescriptor, matrix, matrix.shape, matrix.stride(), block_shape=[8, 16])
    expected = TensorDescriptor.from_tensor(matrix, [8, 16])
    assert type(made) is TensorDescriptor
    assert [getattr(made, field.name) for field in fields(made)[1:]] == [
        getattr(expected, field.name) for field in fields(expected)[1:]
    ]
    assert made.base is expected.base
