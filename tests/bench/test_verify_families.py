"""verify on every family: the oracle runs its blocks, and their parts and kept shares are told."""

import json
from itertools import cycle

import pytest
import torch
from diffusers import DiffusionPipeline

import turbo_rcm_patch as trp
from tests.tiny_families import DENSE, EACH_MODEL, WHOLE, tiny_family_inputs, tiny_family_transformer
from turbo_rcm_patch.bench.keep_out import _ModelCall, find_keep_out
from turbo_rcm_patch.bench.parts import CHOICE, LEFT_OUT, PV, QK, SPARSE_ATTENTION, SUB_LAYERS
from turbo_rcm_patch.bench.report import keep_out_table, verification_table
from turbo_rcm_patch.bench.verify import verify
from turbo_rcm_patch.config import BlockSparse, Quantized, Sparse
from turbo_rcm_patch.keep_list import KeepList
from turbo_rcm_patch.patching.families import family_of
from turbo_rcm_patch.patching.families.ltx2.sub_layers import SUB_LAYERS as LTX2_SUB_LAYERS
from turbo_rcm_patch.tiers import QUANTIZED


class OnlyATransformer(DiffusionPipeline):
    """A pipeline of one step, whose call takes the transformer's inputs."""

    num_timesteps = 1

    def __init__(self, transformer):
        super().__init__()
        self.register_modules(transformer=transformer)

    def __call__(self, output_type, generator, callback_on_step_end, **inputs):
        with torch.no_grad():
            self.transformer(**inputs)


def verify_family(name, dtype, config, *, sparse=False):
    """Verify one block of each kind."""
    model = tiny_family_transformer(name, dtype, layers=2 if name == "vace" else 1)
    if sparse:
        for _, attn, _ in family_of(model).self_attentions(model):
            attn.proj_l = torch.nn.Linear(64, 64, dtype=dtype)
    return verify(OnlyATransformer(model), tiny_family_inputs(name, model), config=config)


@pytest.mark.parametrize(("name", "dtype"), [*zip(EACH_MODEL, cycle((torch.float32, torch.bfloat16)))])
def test_the_exact_blocks_of_every_family_pass(name, dtype):
    verification = verify_family(name, dtype, "exact")
    assert verification.ok, verification_table(verification)
    assert {check.dtype for check in verification.checks} == {dtype}
    assert all(check.unpatched_error > 0 for check in verification.checks)


@pytest.mark.parametrize("name", [*EACH_MODEL, "skyreels, causal", "ltx2, a timestep per token"])
def test_the_parts_of_every_family_are_checked(name):
    verification = verify_family(name, torch.bfloat16, "quantized")
    assert verification.ok, verification_table(verification)
    blocks = {check.block for check in verification.checks}
    whole = name in WHOLE
    own = {"cross_attention", "feed_forward"} if whole else {*SUB_LAYERS, QK, PV}
    linears = {"attn1.to_q", "attn2.to_out.0", "ffn.net.2"}
    if name.startswith("ltx2"):
        own = {f"{stream} {group}" for _, stream, group in LTX2_SUB_LAYERS} | {QK, PV}
        linears = {"attn1.to_q", "audio_to_video_attn.to_k", "audio_attn2.to_out.0", "ff.net.2"}
    if name.startswith("animate 2"):
        own, linears = set(SUB_LAYERS), {"self_attn.to_q", "cross_attn.to_out.0", "ffn.2"}
    for block in blocks:
        parts = {part.part: part.error for part in verification.parts if part.block == block}
        assert own | linears <= set(parts)
        assert own & {"self_attention", "video self_attention"} <= set(parts)
        assert whole == parts.keys().isdisjoint({"self_attention", "video self_attention"})
        assert all(1e-4 < error < 0.1 for error in parts.values())


def test_what_must_leave_8_bits_is_found_in_another_family():
    name = "vace"
    model = tiny_family_transformer(name, torch.bfloat16, layers=2)
    ffn = model.blocks[1].ffn
    with torch.no_grad():  # only one channel of the GELU counts, and beside another one it has no bits left
        ffn.net[0].proj.weight[5] *= 1e6
        ffn.net[2].weight[:, 5] = 0
    pipe, inputs = OnlyATransformer(model), tiny_family_inputs(name, model)
    assert not verify(pipe, inputs, config="quantized").ok
    found = find_keep_out(pipe, inputs)
    assert (found.ok, found.names) == (True, ("blocks.1.ffn.net.2",)), keep_out_table(found)
    assert verify(pipe, inputs, config=Quantized(keep=found.names)).ok


@pytest.mark.parametrize("name", EACH_MODEL)
def test_a_list_tells_the_model_of_every_family(name, tmp_path):
    model, path = tiny_family_transformer(name, torch.bfloat16, layers=2 if name == "vace" else 1), tmp_path / "k.json"
    found = find_keep_out(OnlyATransformer(model), tiny_family_inputs(name, model))
    path.write_text(json.dumps(found.to_dict()))
    kept = KeepList.read(path)
    assert kept.why_not_for(type(model).__name__, model.config) is None
    assert "num_layers=5" in kept.why_not_for(type(model).__name__, {**model.config, "num_layers": 5})


@torch.no_grad()
def test_a_step_is_judged_by_its_sound_too():
    model = tiny_family_transformer("ltx2", layers=1)
    with trp.patch(model, "quantized"):
        call = _ModelCall("transformer", 0, model, (), tiny_family_inputs("ltx2", model))
        call.compare_with(QUANTIZED.limits)
        assert call.judge().ok
        model.audio_proj_out.weight.mul_(2)
        assert not call.judge().ok


@pytest.mark.parametrize("name", EACH_MODEL)
def test_the_kept_shares_of_every_family_are_told(name):
    config = BlockSparse(mass=0.5, blocks=(5, 4), min_tokens=1)
    verification = verify_family(name, torch.float32, config)
    kept = {share.block: share.share for share in verification.kept}
    assert set(kept) == {check.block for check in verification.checks}
    assert all(0 < share <= 1 for share in kept.values())
    assert all((share == 1) == (name in DENSE) for share in kept.values())
    assert (LEFT_OUT in {part.part for part in verification.parts}) == (name not in DENSE)


@pytest.mark.parametrize(
    "name", ["vace", "chronoedit", "anyflow", "anyflow, a timestep per frame", "ltx2", "ltx2, a timestep per token"]
)
def test_the_sparse_blocks_of_every_family_that_has_them_pass(name):
    config = Sparse(topk=0.7, blocks=(5, 4), quantize=())
    verification = verify_family(name, torch.float32, config, sparse=True)
    assert verification.ok, verification_table(verification)
    for block in {check.block for check in verification.checks}:
        assert {SPARSE_ATTENTION, CHOICE} <= {part.part for part in verification.parts if part.block == block}
