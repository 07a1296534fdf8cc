"""Evaluation: of a pretended pipeline that renders its captions, so that every figure is known, and of a real one."""

import contextlib
import json
import math
import random
from dataclasses import replace

import pytest
import torch

from tests.bench.damage import damage_block
from tests.tiny_wan import rcm_pipeline, tiny_call
from turbo_rcm_patch.bench import evaluate as module
from turbo_rcm_patch.bench.coding import without_tf32
from turbo_rcm_patch.bench.evaluate import (
    EMBEDDED_CALL,
    Accuracy,
    Change,
    evaluate,
    held_out_scenes,
    judge_videos,
    label_of,
    prompt_accuracy,
    summarise,
)
from turbo_rcm_patch.bench.report import evaluation_table
from turbo_rcm_patch.config import BlockSparse, Exact, Quantized, Sparse
from turbo_rcm_patch.shapes.grammar import fill_open, is_held_out, parse_caption
from turbo_rcm_patch.shapes.judge import SCORED, score
from turbo_rcm_patch.shapes.render import FRAMES, HEIGHT, WIDTH, render

TINY_CALL = {key: value for key, value in tiny_call(guidance_scale=1.0).items() if key not in ("prompt", "output_type")}


class Renderer:
    """A pipeline that renders its captions. Every value is off by `offset`.

    draw: changes the scene before it is drawn, given the number of steps.
    """

    _execution_device = torch.device("cpu")

    def __init__(self, offset=0.01, draw=lambda scene, steps: scene):
        self.offset, self.draw = offset, draw
        self._progress_bar_config = {"desc": "mine"}
        self.calls = []

    def set_progress_bar_config(self, **config):
        self._progress_bar_config = config

    def __call__(self, prompt, generator, num_inference_steps, output_type, height, width, num_frames, guidance_scale):
        assert (output_type, height, width, num_frames) == ("pt", HEIGHT, WIDTH, FRAMES)
        assert self._progress_bar_config["disable"]
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "highest"
        seeds = [one.initial_seed() for one in generator]
        self.calls.append((num_inference_steps, list(zip(prompt, seeds, strict=True))))
        videos = [self.video_of(*sample, num_inference_steps) for sample in zip(prompt, generator, strict=True)]
        frames = torch.stack(videos).transpose(1, 2) + self.offset
        return type("Output", (), {"frames": frames})

    def video_of(self, prompt, generator, steps):
        scene = fill_open(parse_caption(prompt), random.Random(generator.initial_seed()))
        return render([self.draw(scene, steps)], generator)[0]


@pytest.fixture(autouse=True)
def patches(monkeypatch):
    """Pretend to patch a Renderer: the exact tier makes its error a tenth, another configuration doubles it."""
    real = module.patch

    @contextlib.contextmanager
    def pretend(pipe, config):
        offset = pipe.offset
        pipe.offset = offset * (0.1 if config == "exact" else 2)
        try:
            yield
        finally:
            pipe.offset = offset

    monkeypatch.setattr(
        module, "patch", lambda pipe, config: (pretend if isinstance(pipe, Renderer) else real)(pipe, config)
    )


@pytest.fixture
def _judged_right(monkeypatch):
    """The judge, which takes most of the time, finds all videos right without a look at them."""
    monkeypatch.setattr(module, "judge_videos", lambda videos, scenes: [score(scene, scene) for scene in scenes])


judged_right = pytest.mark.usefixtures("_judged_right")


def by_variant(evaluation):
    return {(result.variant, result.steps): result for result in evaluation.results}


# --- the figures


def in_fp32():
    return Renderer(offset=0.0)


@judged_right
def test_right_videos_are_all_right_and_the_psnr_is_that_of_the_offsets():
    configs = {"config": Exact(fuse=()), "same": Exact()}
    evaluation = evaluate(Renderer(), n=2, steps=(1, 4), batch_size=1, configs=configs, reference=in_fp32())
    results = by_variant(evaluation)
    variants = ["unpatched", "exact", "config", "unpatched fp32"]
    assert list(results) == [(variant, steps) for steps in (1, 4) for variant in variants]
    for result in evaluation.results:
        assert list(result.accuracy) == [*SCORED, "overall"]
        assert all(accuracy.right == accuracy.asked for accuracy in result.accuracy.values())
        assert result.accuracy["count"].asked == 2
        assert result.accuracy["overall"].asked == sum(result.accuracy[name].asked for name in SCORED)
    offsets = {"unpatched": 0.01, "exact": 0.001, "config": 0.02, "unpatched fp32": 0.0}
    for variant in variants:
        to_fp32, to_exact = (
            pytest.approx(-20 * math.log10(abs(offsets[variant] - offsets[other])), abs=1e-3)
            if variant != other
            else None
            for other in ("unpatched fp32", "exact")
        )
        assert (results[variant, 4].psnr_to_fp32, results[variant, 4].psnr_to_exact) == (to_fp32, to_exact)


@judged_right
def test_equal_frames_count_100_db():
    result = by_variant(evaluate(Renderer(offset=0.0), n=1, steps=(1,), reference=in_fp32()))["unpatched", 1]
    assert (result.psnr_to_fp32, result.psnr_to_exact) == (100.0, 100.0)


@judged_right
def test_psnr_is_the_mean_over_frames_and_videos():
    """One frame of the first of two videos is off by 0.1: 20 dB; all others are equal."""
    pipe = Renderer(offset=0.0)
    render_right, made = pipe.video_of, []

    def video_of(prompt, *rest):
        video = render_right(prompt, *rest)
        if not made:
            video[:, 3] += 0.1
        made.append(prompt)
        return video

    pipe.video_of = video_of
    result = by_variant(evaluate(pipe, n=2, steps=(1,), batch_size=1, reference=in_fp32()))["unpatched", 1]
    assert result.psnr_to_fp32 == pytest.approx((20 + (2 * FRAMES - 1) * 100) / (2 * FRAMES), abs=1e-4)


def test_what_is_drawn_wrong_is_counted_wrong_at_the_steps_where_it_is():
    def draw(scene, steps):
        """Return the scene, but with few steps a gray background and only the first object."""
        return scene if steps == 4 else replace(scene, objects=scene.objects[:1], background="gray")

    scenes = held_out_scenes(3)
    pipe = Renderer(draw=draw)
    results = by_variant(evaluate(pipe, n=3, steps=(1, 4), batch_size=2))
    few, many = (results["exact", steps].accuracy for steps in (1, 4))
    assert many["overall"].share == 1
    assert few["count"].right == sum(len(scene.objects) == 1 for scene in scenes) < 3
    assert few["colour"].right == few["shape"].right == 3
    assert few["colour"].asked == sum(len(scene.objects) for scene in scenes)
    named = [scene.background for scene in scenes if scene.background]
    assert (few["background"].right, few["background"].asked) == (named.count("gray"), len(named))
    assert few["overall"].right == sum(few[name].right for name in SCORED)


@judged_right
def test_a_given_reference_is_the_fp32_run():
    pipe, reference = Renderer(), in_fp32()
    results = evaluate(pipe, n=2, steps=(1,), reference=reference).results
    assert [result.variant for result in results] == ["unpatched", "exact", "unpatched fp32"]
    assert reference.calls == pipe.calls[:1]
    assert reference._progress_bar_config == {"desc": "mine"}


@judged_right
def test_an_fp32_pipeline_is_its_own_reference():
    evaluation = evaluate(in_fp32(), n=1, steps=(2,))
    assert [result.variant for result in evaluation.results] == ["unpatched", "exact"]
    unpatched, exact = evaluation.results
    assert (unpatched.psnr_to_fp32, exact.psnr_to_exact) == (None, None)
    assert exact.psnr_to_fp32 == unpatched.psnr_to_exact == 100.0


# --- captions and noise


def test_scenes_are_held_out_and_the_seed_draws_them():
    scenes = held_out_scenes(50, seed=1)
    assert all(is_held_out(p.colour, p.shape, p.direction) for scene in scenes for p in scene.objects)
    assert held_out_scenes(20, seed=1) == scenes[:20]
    assert held_out_scenes(50, seed=2) != scenes


@judged_right
def test_captions_and_noise_depend_on_the_seed_alone():
    def samples(**options):
        pipe = Renderer()
        pipe.video_of = lambda *_: torch.zeros(3, FRAMES, HEIGHT, WIDTH)
        evaluate(pipe, n=3, **options)
        made = {}
        for steps, batch in pipe.calls:
            made.setdefault(steps, []).extend(batch)
        return made

    made = samples(steps=(1, 2), batch_size=3)
    assert made[1] == made[2]
    assert made[1][:3] == made[1][3:]  # unpatched, exact
    assert len(set(made[1])) == 3
    assert len({seed for _, seed in made[1]}) == 3
    single = samples(steps=(1,), batch_size=1)[1]
    assert single[::2] == single[1::2] == made[1][:3]
    other = samples(steps=(1,), seed=5)[1]
    assert not {seed for _, seed in other} & {seed for _, seed in made[1]}


def test_prompt_accuracy_is_that_of_evaluate():
    pipe = Renderer(draw=lambda scene, steps: replace(scene, background="white"))
    call = {**EMBEDDED_CALL, "num_inference_steps": 50, "guidance_scale": 3.0}
    with without_tf32():
        accuracy = prompt_accuracy(pipe, held_out_scenes(3, seed=2), call, seed=2, batch_size=2)
    assert [(steps, len(batch)) for steps, batch in pipe.calls] == [(50, 2), (50, 1)]
    assert accuracy == by_variant(evaluate(pipe, n=3, steps=(4,), seed=2))["unpatched", 4].accuracy
    assert 0 < accuracy["overall"].share < 1


def test_the_state_of_torch_and_of_the_progress_bar_comes_back_after_an_error(monkeypatch):
    def broken(scene, steps):
        raise RuntimeError("broke while drawing")

    convolution = torch.backends.cudnn.conv.fp32_precision
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    pipe = Renderer(draw=broken)
    try:
        with pytest.raises(RuntimeError, match="broke while drawing"):
            evaluate(pipe, n=1)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert torch.backends.cudnn.conv.fp32_precision == convolution != "ieee"
    assert pipe._progress_bar_config == {"desc": "mine"}
    assert pipe.offset == 0.01


@judged_right
def test_a_line_is_reported_after_each_batch():
    lines = []
    evaluate(Renderer(), n=3, steps=(1, 2), batch_size=2, report=lines.append)
    assert lines == [
        f"{steps}: {done} of 3 captions in 2 variants" for steps in ("1 step", "2 steps") for done in (2, 3)
    ]


# --- accuracy


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (Quantized(), "quantized"),
        (Sparse(), "sparse, topk 0.1"),
        (Sparse(topk=0.15, blocks=(16, 16)), "sparse, topk 0.15, blocks 16×16"),
        (BlockSparse(mass=0.7), "block_sparse, mass 0.7"),
    ],
)
def test_a_sparse_row_says_what_it_keeps(config, label):
    assert label_of(config) == label


def test_standard_error_of_one_question_per_video_is_binomial():
    accuracy = Accuracy.of_videos([(1, 1)] * 30 + [(0, 1)] * 10 + [(0, 0)] * 5)
    assert (accuracy.right, accuracy.asked, accuracy.share) == (30, 40, 0.75)
    assert accuracy.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 39))


def test_standard_error_counts_videos_not_questions():
    together = Accuracy.of_videos([(5, 5)] * 30 + [(0, 5)] * 10)
    assert together.share == 0.75
    assert together.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 39))
    assert Accuracy.of_videos([(3, 4)] * 40).standard_error == 0


def test_accuracy_of_too_little():
    assert Accuracy.of_videos([(0, 0)] * 3) == Accuracy(None, 0, 0, None)
    assert Accuracy.of_videos([]).share is None
    assert Accuracy.of_videos([(1, 2), (0, 0)]) == Accuracy(0.5, 1, 2, None)


def test_a_change_is_of_the_same_videos():
    """Two more of ten answers are right. The error comes from how differently the videos change, not from how hard
    their captions are."""
    assert Change.between([(0, 5), (3, 5)], [(1, 5), (4, 5)]) == Change(0.2, 0.0)
    change = Change.between([(0, 5), (3, 5)], [(0, 5), (5, 5)])
    assert change.share == pytest.approx(0.2)
    assert change.standard_error == pytest.approx(math.sqrt((1 + 1) * 2) / 10)
    assert Change.between([(2, 4)], [(1, 4)]) == Change(-0.25, None)


def test_the_change_from_the_unpatched_run_is_of_as_many_steps():
    pipe = Renderer()

    def draw(scene, steps):
        """Return the scene, but without its second object for the exact patch in one step."""
        is_wrong = steps == 1 and pipe.offset == pytest.approx(0.001)
        return replace(scene, objects=scene.objects[:1]) if is_wrong else scene

    pipe.draw = draw
    results = by_variant(evaluate(pipe, n=2, steps=(1, 2), reference=in_fp32()))
    assert results["exact", 2].change == results["unpatched fp32", 1].change == Change(0.0, 0.0)
    accuracies = [results[variant, 1].accuracy["overall"] for variant in ("unpatched", "exact")]
    assert results["exact", 1].change.share == pytest.approx(accuracies[1].share - accuracies[0].share)
    assert results["exact", 1].change.share < -0.05
    assert results["unpatched", 1].change is results["unpatched", 2].change is None


def test_videos_are_judged_as_pipelines_return_them():
    scenes = [fill_open(scene, random.Random(0)) for scene in held_out_scenes(2)]
    frames = render(scenes, torch.Generator().manual_seed(0)).transpose(1, 2)  # [B, F, 3, H, W]
    assert summarise(judge_videos(frames, scenes))["overall"].share == 1
    assert summarise(judge_videos(frames, scenes[::-1]))["overall"].share < 1


def test_videos_are_judged_by_one_thread(monkeypatch):
    def decode(video):
        seen.append(torch.get_num_threads())
        raise ZeroDivisionError

    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(module, "decode", decode)
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            judge_videos(torch.zeros(1, 1, 3, 8, 8), held_out_scenes(1))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


# --- reports and a real pipeline


@judged_right
def test_table_and_json():
    settings = {"model": "renderer"}
    evaluation = evaluate(Renderer(), n=2, steps=(1, 2), settings=settings, reference=in_fp32())
    lines = evaluation_table(evaluation).splitlines()
    assert len(lines) == 1 + 2 * 3
    decibels = ["dB", "to", "fp32", "dB", "to", "exact"]
    assert lines[0].split() == ["variant", "steps", "overall", "%", "vs", "unpatched", *SCORED, *decibels]
    assert lines[1].split()[:2] == ["unpatched", "1"]
    assert lines[1].endswith("40.0         40.9")
    assert lines[2].endswith("60.0            -")
    assert "100.0 ± 0.0             -" in lines[1]
    assert "100.0 ± 0.0    +0.0 ± 0.0" in lines[2]
    result = json.loads(json.dumps(evaluation.to_dict()))
    settings = {"model": "renderer", "n": 2, "steps": [1, 2], "seed": 0, "batch_size": 16, **EMBEDDED_CALL}
    assert result["settings"] == settings
    assert result["environment"]["torch"] == torch.__version__
    assert len(result["results"]) == 6
    exact = result["results"][1]
    assert (exact["variant"], exact["steps"], exact["psnr_to_exact"]) == ("exact", 1, None)
    assert exact["psnr_to_fp32"] == pytest.approx(60.0, abs=0.01)
    assert result["results"][0]["change"] is None
    assert exact["change"] == {"share": 0.0, "standard_error": 0.0}
    assert exact["accuracy"]["count"] == {"share": 1.0, "right": 2, "asked": 2, "standard_error": 0.0}


def test_a_question_that_was_not_asked_is_a_dash(monkeypatch):
    caption = "a red circle moves up"
    monkeypatch.setattr(module, "held_out_scenes", lambda n, seed: [parse_caption(caption)] * n)
    evaluation = evaluate(in_fp32(), n=1, steps=(1,))
    assert evaluation_table(evaluation).splitlines()[1].split() == [
        *("unpatched", "1", "100.0", "-"),
        *("100.0", "100.0", "100.0", "100.0", "-", "-", "-"),
        *("-", "100.0"),
    ]


@pytest.fixture
def tiny():
    return rcm_pipeline(dtype=torch.bfloat16)


@pytest.fixture
def reference():
    return rcm_pipeline()


def test_a_real_pipeline_is_left_as_it_was(tiny, reference):
    before = {name: value.clone() for name, value in tiny.transformer.state_dict().items()}
    evaluation = evaluate(tiny, TINY_CALL, n=2, steps=(1, 2), batch_size=2, reference=reference)
    assert [result.variant for result in evaluation.results] == ["unpatched", "exact", "unpatched fp32"] * 2
    for result in evaluation.results:
        assert result.accuracy["colour"].right == 0  # nothing can be seen in 32 x 48 pixels
    unpatched, exact, fp32 = evaluation.results[3:]
    assert 50 < unpatched.psnr_to_fp32 < 100
    assert 50 < exact.psnr_to_fp32 < 100
    assert unpatched.psnr_to_exact != unpatched.psnr_to_fp32
    assert fp32.psnr_to_exact == pytest.approx(exact.psnr_to_fp32)
    assert not any("forward" in vars(submodule) for submodule in tiny.transformer.modules())
    after = tiny.transformer.state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())


def test_a_patch_that_computes_something_else_shows_in_the_psnr(tiny, reference, monkeypatch):
    unpatched, right, _ = evaluate(tiny, TINY_CALL, n=1, steps=(2,), reference=reference).results
    damage_block(monkeypatch, module, "transformer.blocks.1", lambda output: output + 0.3 * output.roll(1, -1))
    wrong = evaluate(tiny, TINY_CALL, n=1, steps=(2,), reference=reference).results
    assert wrong[1].psnr_to_fp32 < right.psnr_to_fp32 - 6
    assert wrong[0].psnr_to_exact < unpatched.psnr_to_exact - 6
    assert wrong[0].psnr_to_fp32 == unpatched.psnr_to_fp32
