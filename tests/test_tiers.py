"""Tiers own presets, error limits and options; a configuration belongs to one and refuses what means nothing in it."""

import math
import pickle
from dataclasses import replace

import pytest
import torch

import turbo_rcm_patch as trp
from turbo_rcm_patch.config import resolve_config
from turbo_rcm_patch.tiers import BLOCK_SPARSE, EXACT, QUANTIZED, SPARSE, ErrorLimits, Tier, tier_named


def test_a_configuration_knows_its_tier():
    assert trp.PatchConfig().tier is EXACT
    assert trp.PatchConfig(tier="exact") == trp.PatchConfig() == resolve_config("exact") == trp.PRESETS["exact"]
    assert pickle.loads(pickle.dumps(trp.PatchConfig())) == trp.PatchConfig()
    assert hash(trp.PatchConfig()) == hash(trp.PRESETS["exact"])
    assert trp.PatchConfig(tier=Tier("made up", "", ErrorLimits(2.0, 1.0))).tier.name == "made up"


def test_unknown_tiers_and_presets_are_refused_by_name():
    with pytest.raises(ValueError, match="tier 'fast' is unknown; accepted are exact, quantized, sparse"):
        tier_named("fast")
    with pytest.raises(ValueError, match="preset 'fast' is unknown; accepted are exact, quantized, sparse"):
        resolve_config("fast")
    with pytest.raises(ValueError, match="tier 'fast' is unknown; accepted are exact"):
        trp.PatchConfig(tier="fast")


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("exact_steps", (0, 1), "the exact tier runs every step exactly; leave it at None"),
        ("restorable", False, "the exact tier replaces no weights, .*; leave it at True"),
        ("quantize", ("linears",), "the exact tier computes nothing in 8 bits; leave it at"),
        ("keep", ("blocks.0.*",), r"the exact tier computes nothing in 8 bits; leave it at \(\)"),
    ],
)
def test_options_that_mean_nothing_yet_are_refused_with_the_reason(option, value, reason):
    with pytest.raises(ValueError, match=f"{option}=.* means nothing in this version: {reason}"):
        trp.PatchConfig(**{option: value})
    tier = Tier("other", "A tier in which all options mean something.", EXACT.limits)
    assert getattr(trp.PatchConfig(tier=tier, **{option: value}), option) == value


@pytest.mark.parametrize("tier", [SPARSE, BLOCK_SPARSE])
@pytest.mark.parametrize("attention", ["auto", "block_sparse"])
def test_a_changed_copy_of_the_sparse_tier_is_refused(tier, attention):
    """It would lose its changes, because each of the tier's two kinds has limits of its own."""
    with pytest.raises(ValueError, match="a changed copy of the sparse tier is not supported; give tier='sparse'"):
        trp.PatchConfig(tier=replace(tier, limits=ErrorLimits(factor=9.0, fp32=1.0)), attention=attention)
    equal = trp.PatchConfig(tier=replace(tier), attention=attention).tier
    assert equal is (BLOCK_SPARSE if attention == "block_sparse" else SPARSE)


def test_who_multiplies_in_the_projections():
    with pytest.raises(ValueError, match="linears='cublas' is unknown; accepted are auto, triton, torch"):
        trp.PatchConfig(linears="cublas")
    with pytest.raises(ValueError, match="linears='triton' contradicts implementation='torch'"):
        trp.PatchConfig(linears="triton", implementation="torch")
    assert trp.PatchConfig(linears="torch", implementation="triton").linears == "torch"  # our skip after their linear


@pytest.mark.parametrize(("attention", "implementation"), [("triton", "torch"), ("sdpa", "triton")])
def test_contradictions_of_attention(attention, implementation):
    with pytest.raises(ValueError, match=f"attention='{attention}'"):
        trp.PatchConfig(attention=attention, implementation=implementation)


def test_limits_by_dtype():
    limits = ErrorLimits(factor=1.5, fp32=1e-5)
    assert limits.allowed(1e-3, torch.bfloat16) == pytest.approx(1.5e-3)
    assert limits.allowed(1e-8, torch.float16) == pytest.approx(1.5e-8)  # no more than that of a low precision
    assert limits.allowed(1e-8, torch.float32) == 1e-5
    assert limits.allowed(1e-2, torch.float32) == pytest.approx(1.5e-2)
    assert limits.allowed(0.0, torch.float64) == 1e-5
    for dtype in (torch.bfloat16, torch.float32):
        assert math.isnan(limits.allowed(math.nan, dtype))


def test_own_limits_of_a_tier():
    """They count where they are wider than those beside the unpatched error, in every dtype."""
    limits = ErrorLimits(factor=2.0, fp32=1e-5, block=4e-2, part=5e-2, step=1e-1)
    assert limits.allowed(1e-3, torch.bfloat16) == limits.allowed(0.0, torch.float32) == 4e-2
    assert limits.allowed(1e-3, torch.bfloat16, "part") == 5e-2
    assert limits.allowed(1e-1, torch.float16, "step") == pytest.approx(2e-1)
    assert math.isnan(limits.allowed(math.nan, torch.bfloat16, "step"))


def test_the_quantized_tiers_limits_are_signal_to_noise_ratios():
    assert QUANTIZED.limits.block == pytest.approx(0.0398, abs=1e-4)  # 28 dB
    assert QUANTIZED.limits.part == pytest.approx(0.0501, abs=1e-4)  # 26 dB


def test_options_of_the_quantized_tier():
    config = trp.PatchConfig(tier="quantized", quantize=["linears"], keep=["blocks.0.*"], exact_steps=[1, 2])
    assert (config.quantize, config.keep, config.exact_steps) == (("linears",), ("blocks.0.*",), (1, 2))
    assert resolve_config("quantized") == trp.PatchConfig(tier="quantized")
    with pytest.raises(ValueError, match="quantize='linears' is a string; give a sequence of attention, linears"):
        trp.PatchConfig(tier="quantized", quantize="linears")
    with pytest.raises(ValueError, match="quantize='gelu' is unknown; accepted are attention, linears"):
        trp.PatchConfig(tier="quantized", quantize=("gelu",))
    for wrong in (1, (1,), (-1, 0), (0.5, 1), "12"):
        with pytest.raises(ValueError, match=r"exact_steps=.*; give \(first, last\)"):
            trp.PatchConfig(tier="quantized", exact_steps=wrong)


def test_options_of_the_vae():
    for tier in ("exact", "quantized"):
        assert trp.PatchConfig(tier=tier).vae is True
        assert trp.PatchConfig(tier=tier, vae=False, vae_chunk=2).vae_chunk == 2
    for wrong in (None, 1, "decoder"):
        with pytest.raises(ValueError, match=r"vae=.*; give True or False"):
            trp.PatchConfig(vae=wrong)
    for wrong in (0, -1, 1.5, True, "4"):
        with pytest.raises(ValueError, match=r"vae_chunk=.*; give a number of latent frames from 1 on, or None"):
            trp.PatchConfig(vae_chunk=wrong)


def test_block_sparse_attention_is_the_sparse_tiers():
    config = trp.PatchConfig(tier="sparse", attention="block_sparse")
    assert config == resolve_config("block_sparse")
    assert (config.tier.name, config.tier) == ("sparse", BLOCK_SPARSE)
    assert replace(config, attention="auto").tier is SPARSE
    assert replace(resolve_config("sparse"), attention="block_sparse").tier is BLOCK_SPARSE
    for tier in ("exact", "quantized"):
        with pytest.raises(ValueError, match=f"the {tier} tier attends to all keys; give tier='sparse' with it"):
            trp.PatchConfig(tier=tier, attention="block_sparse")
    with pytest.raises(ValueError, match="attention='block_sparse' needs 'self_attention' in fuse"):
        trp.PatchConfig(tier="sparse", attention="block_sparse", fuse=("feed_forward",))


@pytest.mark.parametrize(
    ("option", "value"), [("mass", 0.8), ("min_tokens", 0), ("exact_layers", [1, 0]), ("exact_steps", (1, 0))]
)
def test_options_of_block_sparse_attention(option, value):
    config = trp.PatchConfig(tier="sparse", attention="block_sparse", **{option: value})
    assert getattr(config, option) == (tuple(value) if isinstance(value, list) else value)
    for tier in ("exact", "sparse", *(("quantized",) if option != "exact_steps" else ())):
        with pytest.raises(ValueError, match=f"{option}=.* means nothing in this version: the {tier} tier"):
            trp.PatchConfig(tier=tier, **{option: value})


def test_block_sparse_attention_refuses_what_is_sla_s_and_what_has_no_meaning():
    with pytest.raises(ValueError, match=r"topk=0\.2 means nothing .*, as many blocks as hold `mass`"):
        trp.PatchConfig(tier="sparse", attention="block_sparse", topk=0.2)
    for option, wrong, message in (
        ("mass", 0, "above 0 and at most 1"),
        ("mass", 1.1, "above 0 and at most 1"),
        ("mass", True, "above 0 and at most 1"),
        ("min_tokens", -1, "a number of tokens from 0 on"),
        ("min_tokens", 1.5, "a number of tokens from 0 on"),
        ("exact_layers", (1,), "two numbers of layers from 0 on"),
    ):
        with pytest.raises(ValueError, match=f"{option}=.*{message}"):
            trp.PatchConfig(tier="sparse", attention="block_sparse", **{option: wrong})
