"""One configuration class per tier: its options, the errors for all others, and the error limits."""

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch

import turbo_rcm_patch as trp
from turbo_rcm_patch.config import options_of, presets_with, resolve_config
from turbo_rcm_patch.tiers import BLOCK_SPARSE, EXACT, QUANTIZED, SPARSE, TIERS, ErrorLimits

CLASSES = {"exact": trp.Exact, "quantized": trp.Quantized, "sparse": trp.Sparse, "block_sparse": trp.BlockSparse}


@pytest.mark.parametrize("name", CLASSES)
def test_each_preset_is_a_tiers_class_with_its_defaults(name):
    config = CLASSES[name]()
    assert resolve_config(name) == trp.PRESETS[name] == config
    assert config.tier is TIERS[name]
    assert config.tier.name == name
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config)):
        assert same == config
        assert hash(same) == hash(config)
    assert resolve_config(config) is config
    assert [config == other for other in trp.PRESETS.values()].count(True) == 1
    with pytest.raises(AttributeError):
        config.residual = "same"


def test_the_base_is_no_configuration():
    message = "PatchConfig is not the configuration of a tier; make one of trp.Exact, trp.Quantized, trp.Sparse, trp.Bl"
    with pytest.raises(TypeError, match=message):
        trp.PatchConfig()
    with pytest.raises(TypeError, match=message):
        trp.PatchConfig(vae=False)


def test_unknown_presets_are_refused_by_name():
    with pytest.raises(
        ValueError, match="preset 'fast' is unknown; accepted are exact, quantized, sparse, block_sparse"
    ):
        resolve_config("fast")
    for wrong in (None, trp.Quantized, {"tier": "exact"}):
        with pytest.raises(TypeError, match=r"give a configuration, such as trp\.Exact\(\), or .*: exact, quantized"):
            resolve_config(wrong)


EIGHT_BITS = {"quantize": ("attention",), "keep": ("blocks.0",), "restorable": False}
OWN = {
    "exact": {},
    "quantized": EIGHT_BITS | {"exact_steps": (1, 2)},
    "sparse": EIGHT_BITS | {"topk": 0.2, "blocks": (64, 64)},
    "block_sparse": EIGHT_BITS
    | {"mass": 0.8, "blocks": (64, 64), "min_tokens": 0, "exact_steps": (1, 0), "exact_layers": (0, 1)},
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_tier_has_its_own_options_and_those_of_all(name):
    assert options_of(CLASSES[name]) == options_of(trp.Exact) | set(OWN[name])
    config = CLASSES[name](**OWN[name], fuse=["self_attention"], linears="torch")
    for option, value in (OWN[name] | {"fuse": ("self_attention",), "linears": "torch"}).items():
        assert getattr(config, option) == value


OPTIONS = {option: value for options in OWN.values() for option, value in options.items()}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", CLASSES)
def test_options_of_other_tiers_are_refused_with_the_tiers_that_have_them(name, option):
    owners = [other for other in CLASSES if option in OWN[other]]
    assert presets_with(option) == tuple(owners)
    if name in owners:
        return
    classes = " and ".join(f"trp.{CLASSES[owner].__name__}" for owner in owners)
    verb = "have" if len(owners) > 1 else "has"
    message = f"'{option}' is not an option of trp.{CLASSES[name].__name__}, the {name} tier; {classes} {verb} it."
    with pytest.raises(TypeError) as error:
        CLASSES[name](**{option: OPTIONS[option]})
    assert str(error.value) == message
    with pytest.raises(TypeError, match=f"'{option}' is not an option of"):
        replace(CLASSES[name](), **{option: OPTIONS[option]})


def test_an_option_of_no_tier_is_refused_with_the_tiers_options():
    with pytest.raises(
        TypeError, match=r"'tier' is not an option of trp\.Exact, the exact tier; accepted are fuse, att"
    ):
        trp.Exact(tier="sparse")
    with pytest.raises(
        TypeError, match=r"'top_k' is not an option of trp\.Sparse, the sparse tier; accepted are .* topk"
    ):
        trp.Sparse(top_k=0.1)


@pytest.mark.parametrize("config_class", CLASSES.values())
def test_block_sparse_is_no_kernel_of_attention(config_class):
    with pytest.raises(ValueError, match="attention='block_sparse' is unknown; accepted are auto, triton, sdpa"):
        config_class(attention="block_sparse")


def test_who_multiplies_in_the_projections():
    with pytest.raises(ValueError, match="linears='cublas' is unknown; accepted are auto, triton, torch"):
        trp.Exact(linears="cublas")
    with pytest.raises(ValueError, match="linears='triton' contradicts implementation='torch'"):
        trp.Exact(linears="triton", implementation="torch")
    assert trp.Exact(linears="torch", implementation="triton").linears == "torch"  # our skip after their linear


@pytest.mark.parametrize(("attention", "implementation"), [("triton", "torch"), ("sdpa", "triton")])
def test_contradictions_of_attention(attention, implementation):
    with pytest.raises(ValueError, match=f"attention='{attention}'"):
        trp.Exact(attention=attention, implementation=implementation)


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
    """These limits count wherever they are wider than the ones relative to the unpatched error, in every dtype."""
    limits = ErrorLimits(factor=2.0, fp32=1e-5, block=4e-2, part=5e-2, step=1e-1)
    assert limits.allowed(1e-3, torch.bfloat16) == limits.allowed(0.0, torch.float32) == 4e-2
    assert limits.allowed(1e-3, torch.bfloat16, "part") == 5e-2
    assert limits.allowed(1e-1, torch.float16, "step") == pytest.approx(2e-1)
    assert math.isnan(limits.allowed(math.nan, torch.bfloat16, "step"))


def test_the_quantized_tiers_limits_are_signal_to_noise_ratios():
    assert QUANTIZED.limits.block == pytest.approx(0.0398, abs=1e-4)  # 28 dB
    assert QUANTIZED.limits.part == pytest.approx(0.0501, abs=1e-4)  # 26 dB


def test_values_of_the_8_bit_options():
    config = trp.Quantized(quantize=["attention"], keep=["blocks.0.*"], exact_steps=[1, 2])
    assert (config.quantize, config.keep, config.exact_steps) == (("attention",), ("blocks.0.*",), (1, 2))
    with pytest.raises(ValueError, match=r"exact_steps=\(1, 2\) changes nothing: quantize=\('linears',\)"):
        replace(config, quantize=["linears"])
    for config_class in (trp.Quantized, trp.Sparse, trp.BlockSparse):
        with pytest.raises(
            ValueError, match="quantize='linears' is a string; give a list with any of attention, linears"
        ):
            config_class(quantize="linears")
        with pytest.raises(ValueError, match="quantize='gelu' is unknown; accepted are attention, linears"):
            config_class(quantize=("gelu",))
        with pytest.raises(ValueError, match="keep='ffn' is a string"):
            config_class(keep="ffn")
        for name in (3, ""):
            with pytest.raises(ValueError, match=f"keep contains {name!r}; give names of modules"):
                config_class(keep=[name])
        with pytest.raises(ValueError, match="restorable=0; give True or False"):
            config_class(restorable=0)
    for config_class in (trp.Quantized, trp.BlockSparse):
        for wrong in (1, (1,), (-1, 0), (0.5, 1), (True, True), "12"):
            with pytest.raises(ValueError, match=r"exact_steps=.*; give \(first, last\), two whole numbers of steps"):
                config_class(exact_steps=wrong)


def test_options_of_the_vae():
    for config_class in CLASSES.values():
        assert config_class().vae is True
        assert config_class(vae=False, vae_chunk=2).vae_chunk == 2
        for wrong in (None, 1, "decoder"):
            with pytest.raises(ValueError, match=r"vae=.*; give True, False or '8bit'"):
                config_class(vae=wrong)
        for wrong in (0, -1, 1.5, True, "4"):
            with pytest.raises(
                ValueError, match=r"vae_chunk=.*; give a whole number of latent frames, at least 1, or None"
            ):
                config_class(vae_chunk=wrong)


@pytest.mark.parametrize(
    ("config_class", "option", "wrong", "message"),
    [
        (trp.Sparse, "topk", 0, "above 0 and at most 1"),
        (trp.Sparse, "topk", "0.1", "above 0 and at most 1"),
        (trp.Sparse, "blocks", (64,), r"give \(queries, keys\), two whole numbers of tokens, at least 1, or None"),
        (
            trp.BlockSparse,
            "blocks",
            (64, 0),
            r"give \(queries, keys\), two whole numbers of tokens, at least 1, or None",
        ),
        (trp.BlockSparse, "mass", 0, "above 0 and at most 1"),
        (trp.BlockSparse, "mass", 1.1, "above 0 and at most 1"),
        (trp.BlockSparse, "mass", True, "above 0 and at most 1"),
        (trp.BlockSparse, "min_tokens", -1, "a whole number of tokens, at least 0"),
        (trp.BlockSparse, "min_tokens", 1.5, "a whole number of tokens, at least 0"),
        (trp.BlockSparse, "exact_layers", (1,), "two whole numbers of layers, at least 0"),
        (
            trp.BlockSparse,
            "fuse",
            ("feed_forward",),
            "lacks 'self_attention', which runs the block-sparse attention; add it",
        ),
    ],
)
def test_values_of_the_sparse_options(config_class, option, wrong, message):
    with pytest.raises(ValueError, match=f"{option}=.*{message}"):
        config_class(**{option: wrong})


def test_what_runs_in_8_bits():
    for config_class in (trp.Quantized, trp.Sparse, trp.BlockSparse):
        config = config_class(quantize=["linears"])
        assert config.in_8_bits("linears")
        assert not config.in_8_bits("attention")
    assert not trp.Exact().in_8_bits("linears")


def test_limits_without_8_bits():
    """SLA is the model's own arithmetic; block-sparse attention leaves out keys that the model was trained to see."""
    for config_class in CLASSES.values():
        assert config_class().limits == config_class.tier.limits
    assert trp.Quantized(quantize=()).limits == EXACT.limits
    assert trp.Sparse(quantize=()).limits == replace(EXACT.limits, choice=SPARSE.limits.choice)
    assert trp.BlockSparse(quantize=()).limits == BLOCK_SPARSE.limits
