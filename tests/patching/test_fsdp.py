"""FSDP2 (fully_shard) around a patched transformer, in a world of one process on the CPU."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.pairs import output_of
from tests.ranks import shard
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("family", "param_dtype"), [("wan", None), ("wan", torch.float64), ("ltx2", None)])
def test_a_patched_model_can_be_sharded_and_restored(mesh, family, param_dtype):
    patched, plain = (tiny_family_transformer(family, layers=1) for _ in range(2))
    patch = trp.patch(patched)
    for model in (patched, plain):
        shard(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    assert "what is fused shows after a first call" in patch.summary()
    expected = output_of(family, plain)
    for _ in range(2):
        assert relative_error(output_of(family, patched), expected) <= 1e-5
    assert "DTensor" not in patch.summary()
    assert "after a first call" not in patch.summary()
    assert relative_error(output_of(family, patched), expected) <= 1e-5
    patch.restore()
    assert torch.equal(output_of(family, patched), expected)
    assert not any("forward" in module.__dict__ for module in patched.modules())


@pytest.mark.parametrize("runs_first", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_sharded_model_is_refused_with_the_remedy(mesh, whole, runs_first):
    """A first forward leaves the parameters of the outermost sharded module whole."""
    model = tiny_wan_transformer(layers=1)
    fully_shard(model if whole else model.blocks[0], mesh=mesh)
    if runs_first:
        with torch.no_grad():
            model(**tiny_transformer_inputs(model))
    with pytest.raises(trp.PatchError, match="sharded already; patch it first, then shard it"):
        trp.patch(model)
