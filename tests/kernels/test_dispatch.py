from types import SimpleNamespace

import pytest
import torch

from turbo_rcm_patch.kernels import dispatch


@pytest.mark.parametrize(
    ("kind", "capability", "hip", "expected"),
    [
        ("cuda", (9, 0), None, True),
        ("cuda", (8, 9), None, False),
        ("cuda", (10, 0), None, False),
        ("cuda", (9, 0), "6.4", False),  # AMD numbers its GPUs too
        ("cpu", (9, 0), None, False),  # the interpreter plays one, but no Gluon
    ],
)
def test_is_sm90(monkeypatch, kind, capability, hip, expected):
    properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    dispatch._gpu_properties.cache_clear()
    try:
        assert dispatch.is_sm90(torch.device(kind)) is expected
        assert dispatch.device_properties(torch.device(kind)) == ((capability, 7) if kind == "cuda" else ((9, 0), 4))
    finally:
        dispatch._gpu_properties.cache_clear()


def test_a_gpu_is_asked_once_for_its_capability(monkeypatch):
    asked = []

    def properties(device):
        asked.append(device)
        return SimpleNamespace(major=8 + len(asked), minor=0, multi_processor_count=7)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    dispatch._gpu_properties.cache_clear()
    try:
        assert [dispatch.device_capability(torch.device("cuda:0")) for _ in range(2)] == [(9, 0)] * 2
        # Without an index it is the current one, which may be another GPU the next time.
        assert [dispatch.device_capability(torch.device("cuda")) for _ in range(2)] == [(10, 0), (11, 0)]
    finally:
        dispatch._gpu_properties.cache_clear()


def test_only_what_somebody_watches_comes_as_the_custom_op():
    class Subclass(torch.Tensor):
        pass

    plain, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    launch = dispatch.KernelLaunch(lambda *_: "directly", lambda *arguments: arguments, "name")
    assert launch(plain, None, 1, torch.float32) == "directly"
    for watched in ((plain, None, parameter), (plain, 1.0, plain.as_subclass(Subclass))):
        assert launch(*watched) == ("name", *watched)
    with torch.no_grad():
        assert launch(plain, parameter) == "directly"
        assert launch(plain.as_subclass(Subclass))[0] == "name"


def test_the_kernels_of_one_op_share_a_custom_op_that_knows_them_by_name():
    @dispatch.kernels_op("test_kernels_op")
    def op(x: torch.Tensor, more: float = 0.0) -> torch.Tensor:
        return torch.empty_like(x)

    twice, thrice = (
        op.launch(name, lambda x, more=0.0, by=by: by * x + more) for name, by in (("two", 2), ("three", 3))
    )
    x = torch.ones(2)
    assert [twice(x).tolist(), thrice(x, 1.0).tolist()] == [[2, 2], [4, 4]]
    called = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append((func._schema.name, args[0]))
            return func(*args, **kwargs or {})

    with Mode():
        assert thrice(x).tolist() == [3, 3]
    assert ("turbo_rcm_patch::test_kernels_op", "three") in called
    compiled = torch.compile(lambda x: thrice(x, 2.0), fullgraph=True, backend="eager")
    assert compiled(x).tolist() == [5, 5]
