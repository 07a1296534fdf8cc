"""The tests' own walks over modules yield what torch's do."""

from tests import module_walks
from tests.tiny_wan import tiny_wan_transformer


def test_the_walks_are_torchs():
    model = tiny_wan_transformer()
    model.again, model.nothing = model.blocks[1], None
    model.register_module("no_module", None)
    for once in (True, False):
        found = list(module_walks.modules(model, once))
        assert found == list(module_walks.TORCHS_MODULES(model, once))
        for prefix in ("", "a"):
            named = list(module_walks.named_modules(model, None, prefix, once))
            assert named == list(module_walks.TORCHS_NAMED_MODULES(model, None, prefix, once))
    assert model.again in found
