"""scripts/benchmarks/first_step.py."""

import json
import sys

import pytest
import torch

from scripts.benchmarks import first_step


def test_a_child_has_the_cache_that_it_is_given_and_its_last_line_counts(tmp_path):
    program = "import os; print('loading'); print('{\"' + os.environ['TRITON_CACHE_DIR'] + '\": 1.5}')"
    assert first_step.run_child([sys.executable, "-c", program], str(tmp_path)) == {str(tmp_path): 1.5}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        first_step.main(["--config", "tiny"])
    assert "no CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_an_empty_cache_takes_longer_than_a_filled_one(tmp_path, capsys):
    path = tmp_path / "first-step.json"
    assert first_step.main(["--config", "tiny", "--json", str(path)]) == 0
    seconds = json.loads(path.read_text())["seconds"]
    assert seconds["empty cache"]["first patched"] > seconds["filled cache"]["first patched"]
    assert seconds["filled cache"]["first patched"] > seconds["filled cache"]["second patched"] > 0
    assert seconds["empty cache"]["first patched decode"] > seconds["filled cache"]["first patched decode"] > 0
    assert "filled cache" in capsys.readouterr().out
