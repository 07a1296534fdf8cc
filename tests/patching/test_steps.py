"""Which steps of a generation run their attention exactly, by what the scheduler counts."""

import copy
import gc
import pickle
from types import SimpleNamespace

import pytest

from turbo_rcm_patch.patching.steps import Steps


class Pipe:
    def __init__(self, **scheduler):
        self.scheduler = SimpleNamespace(**scheduler)


@pytest.mark.parametrize(
    ("counts", "exact"), [((0, 0), []), ((1, 0), [0]), ((0, 1), [3]), ((1, 2), [0, 2, 3]), ((9, 0), [0, 1, 2, 3])]
)
def test_first_and_last_steps(counts, exact):
    pipe = Pipe(timesteps=range(4), step_index=None)
    steps = Steps(pipe)
    found = []
    for index in (None, 1, 2, 3):  # a scheduler counts from its first step on
        pipe.scheduler.step_index = index
        found += [index or 0] if steps.why_exact(*counts) else []
    assert found == exact


def test_the_pipelines_scheduler_may_be_another_one():
    pipe = Pipe(timesteps=range(4), step_index=2)
    steps = Steps(pipe)
    assert steps.why_exact(0, 1) is None
    pipe.scheduler = SimpleNamespace(timesteps=range(3), step_index=2)
    assert steps.why_exact(0, 1) == "exact_steps=(0, 1)"


def test_where_nobody_counts_all_steps_are_exact():
    assert Steps(Pipe(timesteps=range(4))).why_exact(0, 0) == "a scheduler that counts no steps"
    pipe = Pipe(timesteps=range(4), step_index=1)
    steps = Steps(pipe)
    for twin in (copy.deepcopy(steps), pickle.loads(pickle.dumps(steps))):
        assert twin.why_exact(0, 0) == "a scheduler that counts no steps"
    del pipe
    gc.collect()
    assert steps.why_exact(0, 0) == "a scheduler that counts no steps"
