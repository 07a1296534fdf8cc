"""The memory of `verify`, counted on tensors without values at the real sizes, beside the plan's."""

from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import turbo_rcm_patch as trp
from tests.patching.families.peak import Peak
from turbo_rcm_patch.bench.memory import checking_stages, searching_stages
from turbo_rcm_patch.bench.oracle import run_oracle, trace_in_fp32
from turbo_rcm_patch.memory.choose import smallest
from turbo_rcm_patch.memory.components import components_both_ways, components_of
from turbo_rcm_patch.memory.empty_models import cast_as_loaded
from turbo_rcm_patch.memory.needs import models_by_preset
from turbo_rcm_patch.memory.plan import CONTEXT
from turbo_rcm_patch.memory.stages import Patched, Video, stages_of, tokens_of
from turbo_rcm_patch.patching.families import CASES

VIDEO = Video(480, 832, 33)


def block_and_call(name):
    """A block of a real size, and its arguments, without values; and the stages that check it in a tier."""
    case = CASES[name]
    with torch.device("meta"):
        model = cast_as_loaded(case.transformer_class(**{**case.transformer, "num_layers": 1}), torch.bfloat16)
        vae = cast_as_loaded(case.vae_class(**case.vae), torch.bfloat16)

    def stage(config):
        patched = Patched({"transformer": model, "vae": vae}, config, case.expand_timesteps)
        return next(checking_stages(patched, VIDEO)).computing

    tokens = tokens_of("transformer", Patched({"transformer": model, "vae": vae}, trp.Exact()), VIDEO)
    width, head = model.config.num_attention_heads * model.config.attention_head_dim, model.config.attention_head_dim
    timesteps = (tokens, 6, width) if case.expand_timesteps else (6, width)
    x, text, timesteps = (
        torch.empty(1, *shape, device="meta", dtype=torch.bfloat16)
        for shape in ((tokens, width), (512, width), timesteps)
    )
    angles = [torch.empty(1, tokens, 1, head, device="meta") for _ in range(2)]
    return model.blocks[0], (x, text, timesteps, angles), stage


def counted(block, run):
    """Return the peak bytes of what runs on the block, and those that are left if the result lives on."""
    attention = mock.patch.object(F, "scaled_dot_product_attention", lambda query, **_: torch.empty_like(query))
    with torch.no_grad(), attention, Peak(block) as seen:
        result = run()
        left = seen.alive
    del result
    return seen.bytes, left


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "wan2.1-14b", "wan2.2-5b"])
def test_the_oracle_of_a_block_takes_what_the_plan_says(name):
    block, args, stage = block_and_call(name)
    taken, _ = counted(block, lambda: run_oracle(block, args, {}, torch.float32))
    given = sum(tensor.nbytes for tensor in (args[0], args[2], *args[3]))  # and two results of the first one's size
    assert 0.97 <= stage(trp.Exact()) / (taken + given + 2 * args[0].nbytes) <= 1.1


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "wan2.1-14b", "wan2.2-5b"])
def test_a_trace_takes_at_most_what_the_plan_says(name):
    block, args, stage = block_and_call(name)
    taken, left = counted(block, lambda: trace_in_fp32(block, args, {}))
    given = sum(tensor.nbytes for tensor in (args[0], args[2], *args[3]))
    attention = 40 * args[0].nbytes // 2  # bytes for each channel: fp32 results, and inputs in bf16 and 8 bits
    needed = given + 2 * args[0].nbytes + max(taken, left + attention)
    assert needed <= stage(trp.Quantized()) <= 1.2 * needed


def test_verify_takes_what_the_page_says():
    page = " ".join((Path(__file__).resolve().parents[2] / "docs/memory.md").read_text().split())
    least = [least_of(tier, frames) for frames in (81, 33) for tier in ("exact", "quantized")]
    words = "at least {} GB in the exact tier and {} GB in 8 bits with 81 frames, {} GB and {} GB with 33 (calculated)"
    assert words.format(*least) in page
    least = [least_of("quantized", frames, searching_stages, components_both_ways) for frames in (81, 33, 5)]
    assert "{} GB with 81 frames, {} GB with 33, {} GB with 5 (calculated)".format(*least) in page


@cache
def wan_14b(tier):
    ((_, patched),) = models_by_preset("wan2.1-14b", preset=tier)
    return patched


def least_of(tier, frames, beside=checking_stages, count=components_of):
    """Return the GB that Wan 14B takes at least."""
    patched = wan_14b(tier)
    components = count(patched.models, patched.config)
    stages = list(stages_of(patched._replace(beside=beside), Video(480, 832, frames)))
    return round((smallest(components, stages).largest_room(components, stages) + CONTEXT) / 1e9)


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "wan2.1-14b", "wan2.2-5b"])
def test_a_search_also_has_the_oracles_output(name):
    """It also has the transformer's inputs and outputs, and for 1.3B the exact tier's tensors."""
    ((_, patched),) = models_by_preset(name, preset="quantized")
    search, check = next(searching_stages(patched, VIDEO)), next(checking_stages(patched, VIDEO))
    config = patched.models["transformer"].config
    oracle = 4 * config.num_attention_heads * config.attention_head_dim * tokens_of("transformer", patched, VIDEO)
    assert oracle <= search.computing - check.computing <= 0.1 * check.computing
