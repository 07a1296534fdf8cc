"""Checks that the tests of all contests share."""

from dataclasses import replace

import torch

from turbo_rcm_patch.bench.ops import measure_errors


def eager(function):
    return function


def check_in_bf16(contest):
    """All contenders round to bf16 twice on the way, each time by at most half a unit in the last place."""
    errors = measure_errors(contest)
    assert set(errors) == {*contest.ours, *contest.rivals}
    assert all(0 < error < torch.finfo(torch.bfloat16).eps for error in errors.values())


def check_that_the_oracle_tells_the_rows_apart(contest):
    shifted = replace(contest, oracle=lambda rows: contest.oracle((rows + 1) % contest.tokens))
    assert min(measure_errors(shifted).values()) > 0.1
