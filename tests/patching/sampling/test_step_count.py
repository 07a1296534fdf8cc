"""The scheduler's count decides which steps of a generation run their attention exactly."""

import copy
import gc
import pickle
from types import SimpleNamespace

import diffusers
import pytest
from diffusers import WanPipeline

import turbo_rcm_patch as trp
from tests.patching.sampled_videos import a_servers_copy
from tests.tiny_wan import tiny_call, tiny_wan_pipeline
from turbo_rcm_patch.patching.sampling.step_count import Steps, why_not_countable
from turbo_rcm_patch.patching.steps.plan import SHARED


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


@pytest.mark.parametrize(
    ("count", "indices", "exact"),
    [(6, (None, 1, 2, 3, 4, 5), "ee...e"), (8, (None, 5, 6, 7), "ee.e")],
    ids=["from the first step", "from a later step"],
)
@pytest.mark.parametrize("known", [None, 3, 4, 6, 10])
def test_the_steps_may_be_of_another_pipeline_with_the_same_scheduler(count, indices, exact, known):
    """The patched pipeline knows the number of steps (known) of its own last generation, or none."""
    pipe = Pipe(timesteps=range(count), step_index=None)
    vars(pipe).update({} if known is None else {"num_timesteps": known})
    steps = Steps(pipe)
    for _ in range(2):
        found = ""
        for index in indices:
            pipe.scheduler.step_index = index
            found += "e" if steps.why_exact(2, 1) else "."
        assert found == exact


def test_a_later_generation_from_the_first_step_on():
    """Before its first step nothing of the last generation counts."""
    pipe = Pipe(timesteps=range(8), step_index=None)
    steps = Steps(pipe)
    for index in (None, 6, 7):
        pipe.scheduler.step_index = index
        steps.why_exact(0, 1)
    pipe.scheduler = SimpleNamespace(timesteps=range(6), step_index=None)
    assert steps.why_exact(0, 1) is None


def test_the_only_step_of_a_generation_is_its_last():
    pipe = Pipe(timesteps=range(8), step_index=None)
    pipe.num_timesteps = 1
    assert Steps(pipe).why_exact(0, 1) == "exact_steps=(0, 1)"


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


def test_a_scheduler_outside_of_a_generation_counts_nothing(caplog):
    """The scheduler has no timesteps or has done them all, because another pipeline runs the transformer."""
    for scheduler in ({"step_index": None, "num_inference_steps": None}, {"step_index": 4, "num_inference_steps": 4}):
        pipe = Pipe(timesteps=range(4), **scheduler)
        steps = Steps(pipe)
        for _ in range(2):
            assert steps.why_exact(1, 0) == "a scheduler that counts no steps"
        assert caplog.text.count("Patch the pipeline that you call") == 1
        caplog.clear()


def rebuilt(pipe):
    other = WanPipeline(**pipe.components)
    trp.use_rcm(other)
    return other


def exact_steps(pipe):
    """For each step of a generation, True if its attention runs exactly."""
    shared, exact = vars(pipe.transformer)[SHARED], []
    hook = pipe.transformer.register_forward_pre_hook(lambda *_: exact.append(bool(shared.why_exact_attention())))
    pipe(**tiny_call(num_inference_steps=4, guidance_scale=1.0))
    hook.remove()
    return exact


@pytest.mark.parametrize("make", [a_servers_copy, rebuilt, copy.deepcopy])
def test_the_steps_of_pipelines_with_the_same_transformer(make, caplog):
    pipe = tiny_wan_pipeline()
    trp.use_rcm(pipe)
    trp.patch(pipe, trp.BlockSparse(exact_steps=(1, 1), vae=False))
    for other in (make(pipe), pipe):
        other.set_progress_bar_config(disable=True)
        assert exact_steps(other) == [True, False, False, True]
    assert "no scheduler counts" not in caplog.text


@pytest.mark.parametrize(("counts", "exact"), [((1, 0), [0]), ((0, 1), [2]), ((2, 0), [0, 1]), ((1, 1), [0, 2])])
def test_a_generation_may_begin_at_a_later_step_of_the_scheduler(counts, exact):
    """Video to video with a strength below 1 runs only the last steps, here three of ten."""
    pipe = Pipe(timesteps=range(10), step_index=None)
    pipe.num_timesteps = 3
    steps = Steps(pipe)
    for _ in range(2):  # and so does the next one
        found = []
        for made, index in enumerate((None, 8, 9)):
            pipe.scheduler.step_index = index
            found += [made] if steps.why_exact(*counts) and steps.why_exact(*counts) else []  # asked for by every block
        assert found == exact


def test_generations_of_different_beginnings_in_turn():
    pipe = Pipe(timesteps=range(4), step_index=None)
    steps = Steps(pipe)
    assert steps.why_exact(1, 0)
    pipe.scheduler.step_index = 3
    assert not steps.why_exact(1, 0)
    assert steps.why_exact(2, 0)  # only the second
    pipe.scheduler.step_index = None
    assert steps.why_exact(1, 0)
    for index, in_the_last_two in ((1, False), (2, True)):
        pipe.scheduler.step_index = index
        assert not steps.why_exact(1, 0)
        assert bool(steps.why_exact(0, 2)) == in_the_last_two


@pytest.mark.parametrize(
    "name", ["SkyReelsV2DiffusionForcingPipeline", "SkyReelsV2DiffusionForcingVideoToVideoPipeline"]
)
def test_steps_by_frame_cannot_be_told(name):
    assert why_not_countable(getattr(diffusers, name).__new__(getattr(diffusers, name))).startswith(name)
    assert why_not_countable(diffusers.WanPipeline.__new__(diffusers.WanPipeline)) is None
