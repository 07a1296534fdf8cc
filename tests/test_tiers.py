"""Tiers own presets, error limits and options; a configuration belongs to one and refuses what means nothing in it."""

import math
import pickle

import pytest
import torch

import turbo_rcm_patch as trp
from turbo_rcm_patch.config import resolve_config
from turbo_rcm_patch.tiers import EXACT, ErrorLimits, Tier, tier_named


def test_a_configuration_knows_its_tier():
    assert trp.PatchConfig().tier is EXACT
    assert trp.PatchConfig(tier="exact") == trp.PatchConfig() == resolve_config("exact") == trp.PRESETS["exact"]
    assert pickle.loads(pickle.dumps(trp.PatchConfig())) == trp.PatchConfig()
    assert hash(trp.PatchConfig()) == hash(trp.PRESETS["exact"])
    assert trp.PatchConfig(tier=Tier("made up", "", ErrorLimits(2.0, 1.0))).tier.name == "made up"


@pytest.mark.parametrize("name", ["quantized", "sparse"])
def test_tiers_that_are_not_in_this_version_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"tier '{name}' is not in this version; accepted are exact"):
        tier_named(name)
    with pytest.raises(ValueError, match=f"tier '{name}' is not in this version; accepted are exact"):
        trp.PatchConfig(tier=name)
    with pytest.raises(ValueError, match=f"preset '{name}' is a tier that is not in this version; accepted are exact"):
        resolve_config(name)
    with pytest.raises(ValueError, match="tier 'fast' is unknown; accepted are exact"):
        trp.PatchConfig(tier="fast")


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("exact_steps", (0, 1), "the exact tier runs every step exactly; leave it at None"),
        ("vae", True, "the exact tier leaves the VAE as it is; leave it at None"),
        ("restorable", False, "the exact tier replaces no weights, .*; leave it at True"),
    ],
)
def test_options_that_mean_nothing_yet_are_refused_with_the_reason(option, value, reason):
    with pytest.raises(ValueError, match=f"{option}=.* means nothing in this version: {reason}"):
        trp.PatchConfig(**{option: value})
    tier = Tier("other", "A tier in which all options mean something.", EXACT.limits)
    assert getattr(trp.PatchConfig(tier=tier, **{option: value}), option) == value


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
