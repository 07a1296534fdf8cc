"""The repository of the stand-alone ops, as Hugging Face's `kernels` loads it."""

import ast
import inspect
import sys

import pytest
import torch

from scripts.tools.export_kernels import BACKENDS, OPS, card, export, main
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import dispatch


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels") / "turbo-rcm-ops"
    export(folder)
    return folder


@pytest.fixture(scope="module")
def ops(repository):
    return pytest.importorskip("kernels").get_local_kernel(repository, backend="cpu")


def test_kernels_loads_every_op_from_the_folder(ops, repository):
    assert sorted(ops.__all__) == sorted(OPS)
    for name in OPS:
        assert str(repository) in sys.modules[getattr(ops, name).__module__].__file__
        assert getattr(ops, name) is not getattr(kernels, name)


def test_an_op_runs_in_the_interpreter(ops):
    a, residual = torch.randn(1, 20, 32), torch.randn(1, 20, 48)
    weight, bias, gate = torch.randn(48, 32), torch.randn(48), torch.randn(1, 1, 48)
    out = ops.linear_skip(a, weight, bias, residual, c_out=gate, implementation="triton")
    torch.testing.assert_close(out, residual + gate * (a @ weight.T + bias), rtol=1e-4, atol=1e-4)


def test_the_other_ops_are_the_packages(ops):
    x, q = torch.randn(1, 20, 64), torch.randn(1, 20, 2, 32)
    for name, arguments, options in [
        ("layer_norm_modulate", (x,), {"scale": x[:, 0], "shift": x[:, 1]}),
        ("rms_norm_rope", (x, torch.ones(64)), {"heads": 2, "eps": 1e-6}),
        ("attention", (q, q, q), {"residual": q}),
        ("sparse_linear_attention", (q, q, q, torch.eye(32)), {"topk": 0.5}),
        ("conv_skip", (torch.randn(1, 3, 4, 4, 8), torch.randn(8, 3, 3, 3, 8), None), {}),
    ]:
        ours, theirs = (getattr(module, name)(*arguments, **options) for module in (kernels, ops))
        assert torch.equal(ours, theirs), name
    ours, theirs = (m.attention_8bit(m.quantize_qkv(x, x, x, heads=2), residual=q) for m in (kernels, ops))
    assert torch.equal(ours, theirs)


def test_its_custom_ops_have_a_namespace_of_their_own(ops):
    theirs = sys.modules[f"{ops.__name__}.kernels.dispatch"].NAMESPACE
    assert theirs == ops.__name__ != dispatch.NAMESPACE
    assert all(hasattr(getattr(torch.ops, name), "linear_skip") for name in (theirs, dispatch.NAMESPACE))


def test_it_imports_torch_and_triton_alone(repository):
    found = set()
    for path in repository.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.partition(".")[0])
    assert found - sys.stdlib_module_names == {"torch", "triton"}


def test_both_variants_and_the_card_are_there(repository):
    assert sorted(path.name for path in (repository / "build").iterdir()) == sorted(f"torch-{b}" for b in BACKENDS)
    assert (repository / "README.md").read_text() == card()
    assert all(f"| `{name}` | " in card() for name in OPS)
    assert (repository / "LICENSE").exists()


def test_the_card_says_which_ops_take_an_implementation():
    without = [name for name in OPS if "implementation" not in inspect.signature(getattr(kernels, name)).parameters]
    assert without == ["quantize_weight"]
    assert "Each op except `quantize_weight` takes `implementation=" in card()


@pytest.mark.parametrize(("inside", "message"), [("", "is a file; give a new folder."), ("folder", "Not a directory")])
def test_a_file_in_the_folders_place_is_one_line(tmp_path, monkeypatch, capsys, inside, message):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["export_kernels", str(tmp_path / "file" / inside)])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_folder_with_files_is_not_overwritten(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        export(tmp_path)
