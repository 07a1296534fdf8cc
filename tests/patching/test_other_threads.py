"""Patches that change results, while other threads call the model: every call runs as it began."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers import WanPipeline

import turbo_rcm_patch as trp
from tests.tiny_wan import frames_of, output_of, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.patching import apply

SECONDS = 30  # until a test that waits for another thread fails


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Paused:
    """A call in another thread that waits where ``wait`` is called in it, until ``finish``."""

    def __init__(self, pool, call):
        self._is_there, self._may_go = threading.Event(), threading.Event()
        self._result = pool.submit(call, self.wait)
        assert self._is_there.wait(SECONDS)

    def wait(self, *_):
        self._is_there.set()
        assert self._may_go.wait(SECONDS)

    def finish(self):
        self._may_go.set()
        return self._result.result(SECONDS)


def paused_in_a_block(model):
    def call(wait):
        hook = model.blocks[1].register_forward_pre_hook(wait)
        try:
            return output_of(model)
        finally:
            hook.remove()

    return call


def paused_between_steps(pipe):
    def call(wait):
        return frames_of(pipe, callback_on_step_end=lambda pipe, step, timestep, tensors: wait() or tensors)

    return call


@pytest.mark.parametrize("tier", ["quantized", "block_sparse", trp.Quantized(quantize=("attention",))])
def test_a_model_in_a_call_is_neither_patched_nor_restored(tier, pool):
    model = tiny_wan_transformer()
    expected = output_of(model)
    call = Paused(pool, paused_in_a_block(model))
    with pytest.raises(trp.PatchError, match="cannot patch: another thread is in a call of transformer; patch when"):
        trp.patch(model, tier)
    assert not any("_turbo_rcm_patch" in name for name in vars(model))
    assert torch.equal(call.finish(), expected)
    patch = trp.patch(model, tier)
    ours = output_of(model)
    call = Paused(pool, paused_in_a_block(model))
    with pytest.raises(trp.PatchError, match="cannot restore: another thread is in a call of transformer"):
        patch.restore()
    assert torch.equal(call.finish(), ours)
    patch.restore()
    assert torch.equal(output_of(model), expected)


@pytest.mark.parametrize("target", ["pipeline", "transformer", "its compiled wrapper", "another pipeline"])
def test_a_pipeline_between_two_steps_is_in_a_call(target, pool):
    pipe = tiny_wan_pipeline()
    expected = frames_of(pipe)
    targets = {
        "pipeline": lambda: pipe,
        "transformer": lambda: pipe.transformer,
        "its compiled wrapper": lambda: pipe.transformer,
        "another pipeline": lambda: WanPipeline(**pipe.components),
    }
    if target == "its compiled wrapper":
        model = pipe.transformer
        pipe.transformer = torch.compile(model, backend="eager")
        targets[target] = lambda: model
    with torch.compiler.set_stance("force_eager"):  # compiling takes seconds
        assert_busy(pipe, targets[target](), expected, pool)


def assert_busy(pipe, target, expected, pool):
    call = Paused(pool, paused_between_steps(pipe))
    with pytest.raises(trp.PatchError, match="another thread is in a call of a WanPipeline"):
        trp.patch(target, "quantized")
    assert torch.allclose(call.finish(), expected, rtol=1e-5, atol=1e-5)


def test_a_call_that_begins_during_a_patch_waits_for_it(pool, monkeypatch):
    model, later = tiny_wan_transformer(), []
    plain = output_of(model)
    convert, update = apply.convert_weights, apply.update_groups

    def slowly(step):
        def replacement(*arguments):
            step(*arguments)
            later.append(pool.submit(output_of, model))
            with pytest.raises(TimeoutError):
                later[-1].result(0.1)

        return replacement

    monkeypatch.setattr(apply, "convert_weights", slowly(convert))
    patch = trp.patch(model, "quantized")
    expected = output_of(model)
    assert torch.equal(later[-1].result(SECONDS), expected)
    monkeypatch.setattr(apply, "update_groups", slowly(update))
    patch.restore()
    assert torch.equal(later[-1].result(SECONDS), plain)
    assert len(later) == 2
    assert "_compiled_call_impl" not in vars(model)


def test_a_failed_patch_lets_calls_go_on(monkeypatch):
    model = tiny_wan_transformer()
    expected = output_of(model)

    def failing(*arguments):
        raise MemoryError("none left")

    monkeypatch.setattr(apply, "convert_weights", failing)
    with pytest.raises(MemoryError):
        trp.patch(model, "quantized")
    assert "_compiled_call_impl" not in vars(model)
    assert torch.equal(output_of(model), expected)


def test_the_thread_that_is_in_a_call_may_patch_its_pipeline():
    pipe = tiny_wan_pipeline()

    def patch_after_the_first_step(pipe, step, timestep, tensors):
        if step == 0:
            trp.patch(pipe, "quantized")
        return tensors

    frames_of(pipe, callback_on_step_end=patch_after_the_first_step)
    trp.restore(pipe)
