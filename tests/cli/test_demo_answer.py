"""The parts of an answer on the page of `turbo-rcm demo`."""

import re
from types import SimpleNamespace

import pytest

from turbo_rcm_patch.cli.demo_answer import as_bars, headline_of


def test_bars_are_as_long_as_the_times():
    bars = as_bars({"unpatched": [("x", 1.0), ("y", 3.0)], "patched": [("x", 1.0), ("y", 1.0)]})
    assert re.findall(r"width: ([\d.]+)%", bars) == ["25.00", "75.00", "25.00", "25.00"]
    assert "4.000 s" in bars


@pytest.mark.parametrize(
    ("gpu", "psnr", "shown"),
    [
        ("a GPU", 52.2, "1.2× as fast, the frames agree to 52 dB"),
        ("a GPU", None, "1.2× as fast, the frames are identical"),
        (None, 52.2, "The frames agree to 52 dB"),
    ],
)
def test_the_headline(gpu, psnr, shown):
    patched = SimpleNamespace(total_speedup=1.21, frames=SimpleNamespace(psnr_db=psnr))
    assert headline_of(SimpleNamespace(variants=[patched], environment=SimpleNamespace(gpu=gpu))) == shown
