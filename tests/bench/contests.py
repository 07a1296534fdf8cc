"""A stand-in for torch.compile and a check of errors, for the tests of contests."""

from dataclasses import replace

from turbo_rcm_patch.bench.ops import measure_errors


def eager(function):
    """Stands for torch.compile, which takes long."""
    return function


def errors_beside_another_row(contest):
    """The contenders' errors beside the oracle's rows of the next token: no right result may pass for these."""
    shifted = replace(contest, oracle=lambda rows: contest.oracle((rows + 1) % contest.tokens))
    return measure_errors(shifted).values()
