"""Decoding in strips: the processes of a parallel transformer decode together what one decodes alone."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch.testing._internal.distributed.fake_pg import FakeStore

import turbo_rcm_patch as trp
from tests.oracle import assert_no_worse, relative_error
from tests.patching.families.peak import as_on_a_gpu
from tests.patching.families.test_vae_decoder import WELL_CONDITIONED
from tests.patching.families.test_vae_memory import real
from tests.patching.steps.test_context_parallel import parallelize
from tests.ranks import RANKS, in_cpu_ranks, in_gpu_ranks
from tests.tiny_vae import KINDS, decode, tiny_latents, tiny_vae
from tests.tiny_wan import tiny_call, tiny_wan_pipeline
from turbo_rcm_patch.patching.families.vae import forward, strips
from turbo_rcm_patch.patching.families.vae.chunks import frames_at_once, peak_elements, stages_of
from turbo_rcm_patch.patching.families.vae.classes import patch_size_of
from turbo_rcm_patch.patching.families.vae.decoder import _Decoder, decoded
from turbo_rcm_patch.patching.families.vae.strips import Strip, cuts_of, margins_of, strips_of
from turbo_rcm_patch.tiers import EXACT

FP32 = EXACT.limits.fp32
WIDE, HIGH = (1, 36, 3), (25, 1, 2)  # latents' height and width, and the number of strips
VIDEO = {"height": 32, "width": 320, "num_frames": 5, "output_type": "np"}


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_strips_are_all_of_a_frame(count):
    """Those at the edge have one margin, and are wider by it where there is room."""
    for length in range(count, 41):
        cut = strips_of(1, length, count)
        assert [strip.first for strip in cut] == [0, *(strip.last for strip in cut[:-1])]
        assert cut[-1].last == length
        assert all(strip.first < strip.last for strip in cut)
    assert strips_of(60, 104, 4) == [Strip(3, 0, 27, 104), *strips_of(60, 104, 4)[1:3], Strip(3, 77, 104, 104)]


def test_fewer_pixels_than_processes_are_not_cut():
    assert strips_of(2, 3, 4) is None


def run(vae, z, cuts=None):
    """Decode latents. The stages take different numbers of frames at a time."""
    frames = [2, 3, 4, 4, 5][: 1 + len(vae.decoder.up_blocks)]
    return torch.cat(list(decoded(vae, z, forward.plan_for(vae, z), frames, cuts)), 2)


def in_strips(vae, z, count):
    """All strips, side by side."""
    every = strips_of(*z.shape[-2:], count)
    return torch.cat([run(vae, z, cuts_of(vae.decoder, strip)) for strip in every], every[0].dim + 1)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "size"), [*((kind, WIDE) for kind in KINDS), ("residual, growing", HIGH)])
def test_strips_side_by_side_are_the_whole(kind, size):
    *image, count = size
    vae, z = tiny_vae(kind), tiny_latents(1 if kind == "qwen image" else 2, 1, *image)
    trp.patch(vae)
    whole, joined = run(vae, z), in_strips(vae, z, count)
    assert joined.shape == whole.shape
    assert (joined - whole).abs().max() <= 3e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", ["wan 2.1, growing", "residual"])
def test_the_pixels_of_a_margin_count_and_none_beyond(kind, monkeypatch):
    """The outermost ones are spoilt."""
    vae, z, cut = tiny_vae(kind), tiny_latents(1, 1, 1, 36), _Decoder.cut
    trp.patch(vae)
    margins, strip = margins_of(vae.decoder), strips_of(1, 36, 2)[1]  # which has a margin on the left
    assert len(margins) == 1 + sum(len(block.resnets) for block in vae.decoder.up_blocks[:-1])
    for spoilt in margins:

        def spoil(self, module, x, spoilt=spoilt):
            x = cut(self, module, x)
            return x.index_fill(3, torch.tensor(0), torch.nan) if module is spoilt else x

        monkeypatch.setattr(_Decoder, "cut", spoil)
        for more in (0, 1):
            monkeypatch.setattr(strips, "margins_of", lambda _, wider={spoilt: margins[spoilt] + more}: margins | wider)
            made = run(vae, z, cuts_of(vae.decoder, strip))
            assert made.isnan().any() == (more == 0), margins[spoilt]


@pytest.mark.parametrize("size", ["wan 2.1, 480p", "ti2v-5b, 720p"])
def test_the_estimate_is_what_a_strip_takes(size):
    vae, z = real(size)
    z = z[:, :, :7]
    trp.patch(vae)
    cuts = cuts_of(vae.decoder, strips_of(*z.shape[-2:], 4)[1])
    stages = [stage.of_share(share) for stage, share in zip(stages_of(vae.decoder), cuts.shares, strict=True)]
    whole = peak_elements(stages_of(vae.decoder), [1] * len(stages), z.shape[2])
    for free in (None, 0):
        frames = frames_at_once(vae, z, None, free=free, shares=cuts.shares)
        with as_on_a_gpu(vae) as counted:
            for _ in decoded(vae, z, forward.plan_for(vae, z), frames, cuts):
                pass
        elements = peak_elements(stages, frames, z.shape[2])
        assert 0.95 <= elements * z.shape[-2] * z.shape[-1] * z.itemsize / counted.bytes <= 1.25
    assert elements < 0.6 * whole  # the least that it can take: memory for a whole frame is enough for a strip


# What each rank runs, in a process of its own


def on_cpu(rank):
    torch.accelerator.device_count = lambda: 1  # enable_parallelism divides by it
    pipe = tiny_wan_pipeline()
    patch = trp.patch(pipe)
    parallelize(pipe.transformer)
    widths, results = [], {}
    with widths_of_parts(widths):
        results["video"] = generate(pipe)
    results |= {"widths": widths, "summary": patch.summary()}
    z = tiny_latents(2, 1, 2, 8)
    results["different latents"] = decode(pipe.vae, z + rank)
    if rank == 1:
        pipe.vae.enable_tiling(8, 8, 8, 8)
    results["tiles on one"] = decode(pipe.vae, z)
    results["notes"] = patch.summary()
    pipe.vae.disable_tiling()
    patch.restore()
    results["restored"] = decode(pipe.vae, z) if rank == 0 else None  # which waits for none
    return results


def generate(pipe):
    return torch.from_numpy(pipe(**tiny_call(**VIDEO), generator=torch.Generator().manual_seed(1)).frames[0])


def widths_of_parts(widths):
    """Record the width of each part that a process decodes."""

    def gathered(parts, *others):
        return strips.gathered((widths.append(part.shape[-1]) or part for part in parts), *others)

    return mock.patch.object(forward, "gathered", gathered)


# Checks of the ranks' results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return in_cpu_ranks(on_cpu, tmp_path_factory.mktemp("ranks"))


def test_every_process_has_the_video_of_one(ranks):
    expected = generate(tiny_wan_pipeline())
    for results in ranks:
        assert (results["video"] - expected).abs().max() <= 1e-5
        assert torch.equal(results["video"], ranks[0]["video"])
        assert set(results["widths"]) == {VIDEO["width"] // RANKS}
        assert "each of 2 processes decodes a strip of the frames" in results["summary"]
        assert "whole frames" not in results["summary"]


def test_a_process_that_cannot_does_not_leave_the_others_waiting(ranks):
    """All decode whole frames then, and the summary has the reasons. So they do if they have different latents."""
    vae, z = tiny_wan_pipeline().vae, tiny_latents(2, 1, 2, 8)
    for rank, results in enumerate(ranks):
        assert relative_error(results["different latents"], decode(vae, z + rank)) <= FP32
        own = "tiles" if rank else "another process does not decode in strips"
        assert f"each process decoded whole frames: different latents (1), {own} (1)" in results["notes"]
    assert relative_error(ranks[0]["tiles on one"], decode(vae, z)) <= FP32
    vae.enable_tiling(8, 8, 8, 8)
    assert relative_error(ranks[1]["tiles on one"], decode(vae, z)) <= FP32


def test_after_restore_a_process_decodes_alone(ranks):
    vae, z = tiny_wan_pipeline().vae, tiny_latents(2, 1, 2, 8)
    assert relative_error(ranks[0]["restored"], decode(vae, z)) <= FP32  # here with other threads


def test_after_the_process_group_ended_a_process_decodes_alone(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    pipe, z = tiny_wan_pipeline(), tiny_latents(2, 1, 2, 8)
    patch = trp.patch(pipe)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        parallelize(pipe.transformer)
        assert "decodes a strip" in patch.summary()
    finally:
        dist.destroy_process_group()
    assert relative_error(decode(pipe.vae, z), decode(tiny_wan_pipeline().vae, z)) <= FP32
    assert "decodes a strip" not in patch.summary()


# On GPUs


def large_vae_and_latents(kind):
    return tiny_vae(kind, torch.bfloat16).cuda(), tiny_latents(4, 1, 12, 60, dtype=torch.bfloat16).cuda()


@torch.no_grad()
def on_gpus(rank):
    """A decode in strips of each kind's VAE, which a parallel transformer was patched with."""
    torch.cuda.set_device(rank)
    decodes = {}
    for kind in WELL_CONDITIONED:
        vae, z = large_vae_and_latents(kind)
        pipe = tiny_wan_pipeline(dtype=torch.bfloat16)
        pipe.vae = vae
        patch = trp.patch(pipe.to("cuda"))
        pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=RANKS))
        widths = []
        with widths_of_parts(widths):
            decodes[kind] = decode(vae, z).cpu(), set(widths), patch.summary()
    return decodes


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", WELL_CONDITIONED)
def test_strips_on_a_gpu(kind):
    """Whole frames and strips are in different tiles of the kernels, and are both rounded to bf16."""
    vae, z = large_vae_and_latents(kind)
    unpatched = decode(vae, z).cpu()
    oracle = decode(copy.deepcopy(vae).double(), z.double()).cpu()
    trp.patch(vae)
    for count in (2, 3):
        frames = unpatchify(in_strips(vae, z, count), patch_size=patch_size_of(vae)).clamp(-1, 1)
        assert_no_worse(frames.cpu(), unpatched, oracle)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
def test_two_gpus_decode_no_worse_than_one(tmp_path):
    ranks = in_gpu_ranks(on_gpus, tmp_path)
    for kind in WELL_CONDITIONED:
        vae, z = large_vae_and_latents(kind)
        oracle, unpatched = decode(copy.deepcopy(vae).double(), z.double()).cpu(), decode(vae, z).cpu()
        for results in ranks:
            frames, widths, summary = results[kind]
            assert "each of 2 processes decodes a strip" in summary
            assert widths == {frames.shape[-1] // RANKS // (2 if "residual" in kind else 1)}
            assert_no_worse(frames, unpatched, oracle)
            assert torch.equal(frames, ranks[0][kind][0])
