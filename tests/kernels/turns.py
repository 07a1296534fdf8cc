"""Test a part of the dtypes in Triton's interpreter, which is slow."""

from tests.oracle import DTYPES


def dtypes_in_turns(device, *cases):
    """All dtypes of a GPU, or one of the interpreter's.

    cases: pairs of a parameter's value and all its values. Neighbouring values get different dtypes.
    """
    dtypes = DTYPES[device]
    if device == "cuda":
        return dtypes
    return (dtypes[sum(list(values).index(value) for value, values in cases) % len(dtypes)],)
