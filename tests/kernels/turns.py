"""Test a part of the dtypes: a GPU compiles a kernel for each, and Triton's interpreter is slow."""

from tests.oracle import DTYPES


def dtypes_in_turns(device, *cases):
    """One of the device's dtypes, or all of a GPU's if the test has only one parameter.

    cases: pairs of a parameter's value and all its values. Neighbouring values get different dtypes. So in the product
    of several parameters each value meets every dtype.
    """
    dtypes = DTYPES[device]
    if device == "cuda" and len(cases) == 1:
        return dtypes
    return (dtypes[sum(list(values).index(value) for value, values in cases) % len(dtypes)],)
