"""LoRAs exchanged in place (hot swaps): peft writes into the matrices that are there, through their ``.data``."""

import pytest
from peft import get_peft_model_state_dict

from tests.oracle import relative_error
from tests.patching.lora.test_inside_projections import add_lora, assert_same, make_pair, output_of
from tests.patching.tape import assert_replayed, inputs_for, make_models, run, warm
from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch import patch
from turbo_rcm_patch.tiers import QUANTIZED


def another_lora(model, rank, seed=77):
    """The tensors of a LoRA of another training, for all of the same layers, with diffusers' keys."""
    other = tiny_wan_transformer(layers=len(model.blocks))
    add_lora(other, seed=seed, r=rank)
    tensors = get_peft_model_state_dict(other, adapter_name="first")
    return {f"transformer.{key}": tensor for key, tensor in tensors.items()}


def swap(model, rank):
    model.load_lora_adapter(another_lora(model, rank), adapter_name="first", hotswap=True)


@pytest.mark.parametrize("rank", [4, 3, 9, 80])  # as before, less, more, more than is reserved
@pytest.mark.parametrize(("tier", "limit"), [("exact", 1e-5), ("quantized", QUANTIZED.limits.step)])
def test_a_swap_takes_effect(tier, limit, rank):
    patched, plain, _ = make_pair(tier, lora_alpha=4)
    before = output_of(plain)
    assert relative_error(output_of(patched), before) <= limit
    for model in (patched, plain):
        swap(model, rank)
    after = output_of(plain)
    assert relative_error(after, before) > 3 * limit
    assert relative_error(output_of(patched), after) <= limit


@pytest.mark.parametrize("rank", [4, 3, 9, 80])
def test_a_swap_between_two_replays(tape, rank):
    pair = make_models(layers=1)
    for model in pair:
        add_lora(model, lora_alpha=4)
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = run(pair[0], inputs)
    for model in pair:
        swap(model, rank)
    if rank <= 4:  # else peft makes new matrices
        assert_replayed(pair, inputs)
    warm(pair, inputs)
    assert_replayed(pair, inputs)
    assert relative_error(run(pair[0], inputs), before) > 0.1


@pytest.mark.parametrize("rank", [4, 9])
def test_a_swap_that_diffusers_prepared_for_is_replayed(tape, rank):
    """Matrices have room for all ranks, and scales are tensors."""
    pair = make_models(layers=1)
    for model in pair:
        model.enable_lora_hotswap(target_rank=9)
        model.load_lora_adapter(another_lora(model, 4, seed=5), adapter_name="first")
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = run(pair[0], inputs)
    for model in pair:
        swap(model, rank)
    assert_replayed(pair, inputs)
    plain = tiny_wan_transformer(layers=1)
    plain.load_lora_adapter(another_lora(plain, rank), adapter_name="first")
    assert relative_error(run(pair[0], inputs), run(plain, inputs)) <= 1e-5
    assert relative_error(run(pair[0], inputs), before) > 0.1


def test_a_swap_by_the_pipeline():
    pipes = tiny_wan_pipeline(), tiny_wan_pipeline()
    handle = patch(pipes[0])
    for pipe in pipes:
        add_lora(pipe.transformer, lora_alpha=4)
    first = assert_same(*(pipe.transformer for pipe in pipes))
    for pipe in pipes:
        pipe.load_lora_weights(another_lora(pipe.transformer, 4), adapter_name="first", hotswap=True)
    assert relative_error(assert_same(*(pipe.transformer for pipe in pipes)), first) > 0.1
    handle.restore()
    assert not any("load_lora" in name for name in vars(pipes[0].transformer))
