"""verify, compare and evaluate of the sparse tier: an oracle of the same computation, and nothing wrong passes."""

import pytest
import torch
from torch import nn

from tests.patching.launches import around_launches
from tests.tiny_wan import rcm_pipeline, tiny_call
from turbo_rcm_patch import kernels
from turbo_rcm_patch.bench.compare import compare
from turbo_rcm_patch.bench.oracle import class_copy
from turbo_rcm_patch.bench.parts import CHOICE, PV, QK, SPARSE_ATTENTION, SUB_LAYERS
from turbo_rcm_patch.bench.report import verification_table
from turbo_rcm_patch.bench.verify import verify
from turbo_rcm_patch.config import Sparse
from turbo_rcm_patch.patching import PatchError, patch
from turbo_rcm_patch.tiers import EXACT, SPARSE

SAGE = Sparse(topk=0.7, blocks=(5, 4), vae=False)  # 12 tokens: 2 of 3 key blocks
SLA = Sparse(topk=0.7, blocks=(5, 4), quantize=(), vae=False)


def sparse_pipeline(variant="t2v", dtype=torch.float32):
    pipe = rcm_pipeline(variant, dtype)
    torch.manual_seed(7)
    for model in filter(None, (pipe.transformer, getattr(pipe, "transformer_2", None))):
        for block in model.blocks:
            size = model.config.attention_head_dim
            block.attn1.proj_l = nn.Linear(size, size, dtype=dtype)
    return pipe


def call(steps=2, variant="t2v"):
    return tiny_call(variant, guidance_scale=1.0, num_inference_steps=steps)


@pytest.mark.parametrize(
    ("config", "variant", "dtype"),
    [
        (SAGE, "t2v", torch.float32),
        (SAGE, "wan22", torch.bfloat16),
        (SLA, "t2v", torch.bfloat16),
    ],
)
def test_every_block_and_every_part_of_it_is_within_the_limits(config, variant, dtype):
    steps = 3 if variant == "wan22" else 1
    verification = verify(sparse_pipeline(variant, dtype), call(steps, variant), config=config)
    assert verification.ok, verification_table(verification)
    parts = {part.part: part for part in verification.parts}
    assert {*SUB_LAYERS, SPARSE_ATTENTION, CHOICE} <= set(parts)
    assert not {QK, PV} & set(parts)
    assert ("attn1.to_q" in parts) == config.in_8_bits("linears")
    rounding = torch.finfo(dtype).eps / 2
    assert parts[CHOICE].allowed == max(SPARSE.limits.choice * rounding, SPARSE.limits.fp32)
    for check in verification.checks:
        if config is SAGE:
            assert 1e-3 < check.judged_error <= check.allowed == SPARSE.limits.block
            assert parts["self_attention"].allowed == SPARSE.limits.part
        else:
            assert check.allowed <= max(EXACT.limits.fp32, EXACT.limits.factor * check.unpatched_error)
            assert parts["self_attention"].allowed is None


def wrong_attention(monkeypatch):
    def flipped(result):
        if isinstance(result, kernels.Quantized):
            return kernels.Quantized(result.values.flip(1), result.scale.flip(1))
        return result.flip(1)

    def around(launch):
        return lambda *arguments: flipped(launch(*arguments))

    around_launches(monkeypatch, "SPARSE_LINEAR_ATTENTION", around)  # of plans; the oracle's is not


def no_linear_branch(monkeypatch):
    def around(launch):
        return lambda q, k, v, weight, *others: launch(q, k, v, 0 * weight, *others)

    around_launches(monkeypatch, "SPARSE_LINEAR_ATTENTION", around)


def worst_choice(monkeypatch):
    def wrong(q, k, kept, block_q, block_k, _implementation):
        return kernels.sparse_block_map(-q, k, kept, block_q, block_k)

    monkeypatch.setattr(kernels, "chosen_key_blocks", wrong)


@pytest.mark.parametrize(
    ("damage", "part"),
    [(wrong_attention, "self_attention"), (no_linear_branch, "self_attention"), (worst_choice, CHOICE)],
)
def test_a_wrong_attention_and_a_wrong_choice_fail_where_they_are(monkeypatch, damage, part):
    damage(monkeypatch)
    verification = verify(sparse_pipeline(), call(1), config=SAGE)
    assert {failed.part for failed in verification.failed_parts} == {part}
    assert f"{part}: error" in verification_table(verification)


def test_all_that_is_compared_keeps_the_oracles_blocks_and_the_pipeline_is_left_as_it_was(monkeypatch):
    maps = []
    right = kernels.sparse_linear_attention

    def keep_map(*args, block_map=None, **options):
        maps.append(block_map)
        return right(*args, block_map=block_map, **options)

    def around(launch):
        def keep_map_of_plans(*arguments):
            maps.append(arguments[5])
            return launch(*arguments)

        return keep_map_of_plans

    monkeypatch.setattr(kernels, "sparse_linear_attention", keep_map)
    around_launches(monkeypatch, "SPARSE_LINEAR_ATTENTION", around)
    pipe = sparse_pipeline()
    processors = [block.attn1.processor for block in pipe.transformer.blocks]
    verify(pipe, call(3), config=SLA)
    assert sum(block_map is None for block_map in maps) > 0  # the step between, and what finds the oracle's choice
    checked = [block_map for block_map in maps if block_map is not None]
    assert len(checked) == 2 * 2 * 6  # steps, blocks; patched, unpatched, oracle, and three for the parts
    assert [block.attn1.processor for block in pipe.transformer.blocks] == processors
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in pipe.transformer.blocks)


def test_the_oracle_runs_by_the_reference_whatever_the_patch_runs_by():
    pipe = sparse_pipeline()
    with patch(pipe, Sparse(implementation="triton")):
        block = pipe.transformer.blocks[0]
        assert class_copy(block).attn1.processor.implementation == "torch"
        assert block.attn1.processor.implementation == "triton"


def test_compare_shows_the_same_weights_dense_and_sparse():
    comparison = compare(sparse_pipeline(), call(), config=SLA, warmups=0, repeats=1)
    latents = {variant.name: variant.latents for variant in comparison.variants}
    assert set(latents) == {"unpatched", "patched exactly", "patched"}
    assert latents["patched exactly"].relative_l2 < 1e-5 < 1e-3 < latents["patched"].relative_l2
    assert "SLA 2/3 blocks" in comparison.patch_summary


@pytest.mark.parametrize("run", [verify, compare])
def test_a_model_without_projections_is_refused_by_what_it_needs(run):
    pipe = rcm_pipeline()
    with pytest.raises(PatchError, match=r"has no proj_l, .*trp\.load_turbodiffusion"):
        run(pipe, call(), config="sparse")
