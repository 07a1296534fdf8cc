"""Measure how much of its captions a pipeline shows, unpatched and patched, and how far the frames differ.

Every variant generates the same held-out captions of ``shapes.grammar`` from the same noise. ``shapes.judge`` judges
the videos. Their frames are compared with the exact tier's, and with those of the unpatched pipeline in fp32.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from diffusers import DiffusionPipeline

from ..config import PRESETS, SLA_TOPK, BlockSparse, PatchConfig, Sparse
from ..patching import patch
from ..shapes.grammar import Scene, draw_scene
from ..shapes.judge import SCORED, decode, score
from ..shapes.render import FRAMES, HEIGHT, WIDTH
from ..wording import counted
from .coding import without_tf32
from .environment import Environment, describe_environment
from .metrics import frame_psnr
from .replaced import progress_bar

UNPATCHED, EXACT, UNPATCHED_FP32 = "unpatched", "exact", "unpatched fp32"
VARIANTS = 4  # the most that the command has: unpatched, exact, another tier, unpatched in fp32
EMBEDDED_CALL = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "guidance_scale": 1.0}

Scores = dict[str, tuple[int, int]]  # right and asked, per attribute


@dataclass(frozen=True)
class Accuracy:
    """The number of right answers, of questions asked, and the share right / asked, or None if nothing was asked.

    standard_error: the share's, with videos as the samples, because a video's answers depend on one another. None for
    fewer than two videos.
    """

    share: float | None
    right: int
    asked: int
    standard_error: float | None

    @classmethod
    def of_videos(cls, counts: Sequence[tuple[int, int]]) -> Accuracy:
        """Return the accuracy from (right, asked) of every video, by the ratio estimator of cluster sampling."""
        counts = [(right, asked) for right, asked in counts if asked]
        right, asked = (sum(column) for column in zip((0, 0), *counts, strict=True))
        share = right / asked if asked else None
        if len(counts) < 2:
            return cls(share, right, asked, None)
        squares = sum((r - share * a) ** 2 for r, a in counts)
        return cls(share, right, asked, math.sqrt(squares * len(counts) / (len(counts) - 1)) / asked)


@dataclass(frozen=True)
class Change:
    """A variant's share of right answers minus the unpatched pipeline's, on the same captions and noise.

    standard_error: the paired difference's, with videos as the samples, or None for fewer than two.
    """

    share: float
    standard_error: float | None

    @classmethod
    def between(cls, before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> Change:
        """Return the change from (right, asked) of the same videos in both runs."""
        pairs = zip(before, after, strict=True)
        more = Accuracy.of_videos([(ours - theirs, asked) for (theirs, _), (ours, asked) in pairs])
        return cls(more.share, more.standard_error)


@dataclass(frozen=True)
class Result:
    """One variant at one number of steps.

    accuracy: for every attribute of ``shapes.judge.SCORED`` and, last, "overall".
    change: the change of "overall" from the unpatched run with the same steps, or None for that run itself.
    psnr_to_fp32, psnr_to_exact: dB against the unpatched fp32 run and the exact tier: the mean of ``frame_psnr`` over
    frames and videos. None for that run itself.
    """

    variant: str
    steps: int
    accuracy: dict[str, Accuracy]
    change: Change | None
    psnr_to_fp32: float | None
    psnr_to_exact: float | None


@dataclass(frozen=True)
class Evaluation:
    """Results in the order of the steps, then of the variants; settings as the caller gave them and the call's own."""

    settings: dict[str, object]
    environment: Environment
    results: tuple[Result, ...]

    def to_dict(self) -> dict[str, object]:
        """Return a dictionary for ``json.dump``."""
        return asdict(self)


def evaluate(
    pipe: DiffusionPipeline,
    call: dict[str, object] = EMBEDDED_CALL,
    *,
    n: int = 256,
    steps: Sequence[int] = (1, 2, 4),
    configs: Mapping[str, PatchConfig] | None = None,
    seed: int = 0,
    batch_size: int = 16,
    reference: DiffusionPipeline | None = None,
    tuned: DiffusionPipeline | None = None,
    settings: dict[str, object] | None = None,
    report: Callable[[str], None] = lambda line: None,
    placed: Callable[[DiffusionPipeline], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Evaluation:
    """Generate n held-out captions with each number of steps in every variant. The pipeline is unchanged afterwards.

    The variants are: unpatched, the exact tier, each of `configs` by name, and unpatched in fp32 without TF32.

    pipe: an unpatched text-to-video pipeline that knows the grammar, with its sampler (``use_rcm``) installed.
    call: its arguments, except prompt, num_inference_steps, generator and output_type.
    n: captions. steps: numbers of denoising steps. configs: the exact one among them counts as the exact tier.
    reference: the pipeline loaded in fp32, also with its sampler. None: pipe itself is in fp32.
    tuned: a pipeline with its sampler that `configs` patch instead of pipe: the model fine-tuned for them.
    seed: draws the captions and the noise of each. batch_size: videos made at a time. It changes neither.
    settings: facts to record beside the figures. report: called with a line after each batch.
    placed: (pipeline) -> a context in which its models are where they run. Each batch of a variant enters it.
    """
    scenes, device = held_out_scenes(n, seed), pipe._execution_device
    results = []
    with (
        without_tf32(),
        progress_bar(pipe, disable=True),
        progress_bar(reference or pipe, disable=True),
        progress_bar(tuned or pipe, disable=True),
    ):
        variants, base = _variants(pipe, reference, configs or {}, tuned or pipe)
        for count in steps:
            tallies = {name: _Tally() for name in variants}
            for start in range(0, n, batch_size):
                batch = range(start, min(start + batch_size, n))
                videos = {}
                for name, (variant, switch) in variants.items():
                    with placed(variant), switch():
                        device = variant._execution_device
                        videos[name] = generate_videos(
                            variant, scenes, batch, {**call, "num_inference_steps": count}, seed
                        )
                for name, tally in tallies.items():
                    tally.scores += judge_videos(videos[name], [scenes[i] for i in batch])
                    tally.psnr_to_fp32 += _psnr(videos, name, base)
                    tally.psnr_to_exact += _psnr(videos, name, EXACT)
                report(f"{counted(count, 'step')}: {batch.stop} of {n} captions in {len(variants)} variants")
            results += [tally.result(name, count, tallies[UNPATCHED]) for name, tally in tallies.items()]
    own = {"n": n, "steps": list(steps), "seed": seed, "batch_size": batch_size, **call}
    return Evaluation({**(settings or {}), **own}, describe_environment(device), tuple(results))


def videos_at_a_time(call: Mapping[str, object]) -> int:
    """Return how many videos `evaluate` makes together unless told: 16 of the tiny model's size, fewer larger ones."""
    pixels = call["height"] * call["width"] * call["num_frames"]
    return min(max(1, 16 * HEIGHT * WIDTH * FRAMES // pixels), 16)


def prompt_accuracy(
    pipe: DiffusionPipeline, scenes: Sequence[Scene], call: dict[str, object], *, seed: int = 0, batch_size: int = 16
) -> dict[str, Accuracy]:
    """Return the accuracy of ``pipe(prompt=captions, **call)``, per attribute and overall.

    call: the pipeline's arguments, except prompt, generator and output_type. Noise is as in ``evaluate``.
    """
    scores = []
    with progress_bar(pipe, disable=True):
        for start in range(0, len(scenes), batch_size):
            batch = range(start, min(start + batch_size, len(scenes)))
            scores += judge_videos(generate_videos(pipe, scenes, batch, call, seed), [scenes[i] for i in batch])
    return summarise(scores)


def held_out_scenes(n: int, seed: int = 0) -> list[Scene]:
    """Return n scenes of combinations that training never showed, the first ones of a longer list."""
    generator = random.Random(seed)
    return [draw_scene(generator, held_out=True) for _ in range(n)]


def judge_videos(videos: torch.Tensor, scenes: Sequence[Scene]) -> list[Scores]:
    """Return each video's scores against its scene; videos [B, F, 3, H, W] in [0, 1], as pipelines return them."""
    with _one_thread():
        return [score(scene, decode(video.transpose(0, 1))) for video, scene in zip(videos, scenes, strict=True)]


def summarise(scores: Sequence[Scores]) -> dict[str, Accuracy]:
    """Return the accuracy of every attribute over all videos, and of all attributes together as "overall"."""
    attributes = {name: Accuracy.of_videos([one[name] for one in scores]) for name in SCORED}
    return {**attributes, "overall": Accuracy.of_videos(_totals(scores))}


def _totals(scores: Sequence[Scores]) -> list[tuple[int, int]]:
    """Return the right answers and the questions of every video, all attributes together."""
    return [(sum(right for right, _ in one.values()), sum(asked for _, asked in one.values())) for one in scores]


@dataclass
class _Tally:
    """The results of a variant so far: scores per video, PSNR per frame."""

    scores: list[Scores] = field(default_factory=list)
    psnr_to_fp32: list[float] = field(default_factory=list)
    psnr_to_exact: list[float] = field(default_factory=list)

    def result(self, variant: str, steps: int, unpatched: _Tally) -> Result:
        means = [sum(values) / len(values) if values else None for values in (self.psnr_to_fp32, self.psnr_to_exact)]
        change = None if self is unpatched else Change.between(_totals(unpatched.scores), _totals(self.scores))
        return Result(variant, steps, summarise(self.scores), change, *means)


def _variants(
    pipe: DiffusionPipeline,
    reference: DiffusionPipeline | None,
    configs: Mapping[str, PatchConfig],
    tuned: DiffusionPipeline,
) -> tuple[dict[str, tuple], str]:
    """Return every variant's pipeline and the context to run it in, by name; and the name of the fp32 reference."""
    variants = {
        UNPATCHED: (pipe, contextlib.nullcontext),
        EXACT: (pipe, lambda: patch(pipe, EXACT)),
    }
    variants |= {name: (tuned, partial(patch, tuned, each)) for name, each in configs.items() if each != PRESETS[EXACT]}
    if reference is None:
        return variants, UNPATCHED
    return variants | {UNPATCHED_FP32: (reference, contextlib.nullcontext)}, UNPATCHED_FP32


def label_of(config: PatchConfig) -> str:
    """Return a tier's name, with what a sparse attention keeps: "sparse, topk 0.1, blocks 16×16"."""
    name = config.tier.name
    if not isinstance(config, (Sparse, BlockSparse)):
        return name
    keeps = f"mass {config.mass:g}" if isinstance(config, BlockSparse) else f"topk {config.topk or SLA_TOPK:g}"
    blocks = "" if config.blocks is None else f", blocks {'×'.join(map(str, config.blocks))}"
    return f"{name}, {keeps}{blocks}"


def generate_videos(
    pipe: DiffusionPipeline, scenes: Sequence[Scene], batch: range, call: dict[str, object], seed: int
) -> torch.Tensor:
    """Return videos [B, F, 3, H, W] of some scenes, fp32. The seed and a scene's index determine its noise."""
    noise_seeds = [random.Random(f"{seed} {index}").getrandbits(63) for index in batch]
    generators = [torch.Generator().manual_seed(noise_seed) for noise_seed in noise_seeds]
    prompts = [str(scenes[index]) for index in batch]
    return pipe(**{**call, "prompt": prompts, "generator": generators, "output_type": "pt"}).frames.float()


def _psnr(videos: dict[str, torch.Tensor], name: str, reference: str) -> list[float]:
    return [] if name == reference else frame_psnr(videos[name], videos[reference]).flatten().tolist()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: the judge's operations are so small that 32 threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
