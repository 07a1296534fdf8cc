"""Amounts of memory as people write them."""

import pytest

from turbo_rcm_patch.amounts import enough_in_gb, parse_amount


@pytest.mark.parametrize(
    ("amount", "size"),
    [("8 GB", 8 * 10**9), ("7.5GiB", 15 * 2**29), ("512 mib", 2**29), (" 300MB ", 3 * 10**8), (1234567, 1234567)],
)
def test_amounts(amount, size):
    assert parse_amount(amount) == size


@pytest.mark.parametrize("amount", ["9" * 400 + " GB", 10**400], ids=["text", "number"])
def test_more_than_any_gpu_has(amount):
    with pytest.raises(ValueError, match="is more memory than any GPU has; give what the card has"):
        parse_amount(amount)


@pytest.mark.parametrize("amount", ["8", "8 TB", "GB", "-8 GB", "8 GB free", "", "nan GB"])
def test_what_is_no_amount(amount):
    with pytest.raises(ValueError, match="such as '8 GB'"):
        parse_amount(amount)


def test_nothing_and_other_types():
    with pytest.raises(ValueError, match="more than 0"):
        parse_amount("0 GB")
    with pytest.raises(ValueError, match="more than 0"):
        parse_amount(-1)
    with pytest.raises(
        ValueError, match="8 is less than 1 MB; a whole number means bytes, so give a unit, such as '8 GB'"
    ):
        parse_amount(8)
    for amount in (8.0, True, b"8 GB"):
        with pytest.raises(TypeError, match="such as '8 GB'"):
            parse_amount(amount)


def test_an_amount_that_is_enough_is_rounded_up():
    assert [enough_in_gb(size) for size in (0, 1, 8 * 10**9, 8 * 10**9 + 1)] == ["0.00", "0.01", "8.00", "8.01"]
