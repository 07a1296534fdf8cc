from types import SimpleNamespace

import pytest
import torch

from turbo_rcm_patch.kernels import dispatch, gluon_names


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
def test_is_hopper(monkeypatch, kind, capability, hip, expected):
    properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    dispatch._gpu_properties.cache_clear()
    try:
        assert dispatch.is_hopper(torch.device(kind)) is expected
        assert dispatch.device_properties(torch.device(kind)) == ((capability, 7) if kind == "cuda" else ((9, 0), 4))
    finally:
        dispatch._gpu_properties.cache_clear()


@pytest.mark.parametrize(
    ("version", "runs"),
    [("3.6.0", True), ("3.7.1", True), ("3.8.0+git1", True), ("3.9.0", False), ("3.10.1", False), ("4.0.0", False)],
)
def test_kernels_in_gluon_name_the_tritons_that_they_are_not_run_with(monkeypatch, version, runs):
    reason = gluon_names.why_not_this_triton(version)
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    told = dispatch.why_not_hopper(torch.device("cuda"), torch.bfloat16, reason)
    assert told is None if runs else "Triton 3.6 to 3.8" in told
