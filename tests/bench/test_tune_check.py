"""Tune beside the shipped measurements: these are hidden while it runs and back afterwards, and steps go by either."""

import importlib.util
import itertools
import json
import os
from pathlib import Path

import pytest
import torch

from tests.tune_times import timed
from turbo_rcm_patch.bench import tune_check
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.tune import Shapes
from turbo_rcm_patch.bench.tune_check import (
    SHIPPED,
    TUNED,
    Choices,
    OpChoice,
    TuneCheck,
    check_table,
    compare_choices,
    shipped_choices,
    tuned_choices,
)
from turbo_rcm_patch.cli.tuning import keep
from turbo_rcm_patch.kernels import why_torch
from turbo_rcm_patch.kernels.choice import measured, tuned
from turbo_rcm_patch.kernels.choice.measured import OPS, Verdict
from turbo_rcm_patch.patching.steps.plan import Call

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("check_tune", ROOT / "scripts/check_tune.py")
check_tune = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_tune)

GPU, CAPABILITY = "NVIDIA H200", (9, 0)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ORIGIN = f"{GPU} by turbo-rcm tune, of small at 32x48x5"
SHAPES = Shapes("small", "32x48x5", 2, 64, 40, 70, [(2, 3, 4, 8, 8, 3, 3, 1, 1)])


@pytest.fixture
def gpu(monkeypatch):
    """What PyTorch says of the GPU that the shipped measurements are of."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: CAPABILITY)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A user's cache folder, in which tune kept that our attention is the slower one, as a new process knows it."""
    monkeypatch.setenv(tuned.CACHE, str(tmp_path / "cache"))
    tune(attention=9.0)
    monkeypatch.setattr(measured, "_TUNED", measured.all_tuned())
    return tmp_path / "cache"


def tune(gpu=GPU, **ours):
    """What tune does with times of ours by op (default 2 ms), beside 3 ms of what runs otherwise."""
    keep(SHAPES, gpu, CAPABILITY, timed(**ours))


def reasons():
    return {op: why_torch(op, CUDA, torch.bfloat16) for op in OPS}


SLOW_GELU = f"PyTorch's was faster on {ORIGIN}"


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_what_is_known_is_hidden_while_tune_runs_and_back_afterwards(gpu, cache, error):
    before, kept, seen = reasons(), {path: path.read_text() for path in cache.rglob("*.json")}, []
    assert "by turbo-rcm tune" in before["attention"]
    assert before["linear_gelu"] is None

    def run():
        assert reasons() == dict.fromkeys(OPS, "not measured on sm_90")
        assert tuned.read_tuned() == {}
        tune(linear_gelu=4.0)
        seen.append(tuned.tuned_folder())
        if error is not None:
            raise error("no more")

    if error is None:
        found, seconds = tuned_choices(run)
        assert found.of_gpu(GPU, CAPABILITY)["linear_gelu"] == Verdict((ORIGIN,), 4.0, 3.0)
        assert seconds > 0
    else:
        with pytest.raises(error):
            tuned_choices(run)
    assert reasons() == before
    assert os.environ[tuned.CACHE] == str(cache)
    assert {path: path.read_text() for path in cache.rglob("*.json")} == kept
    (folder,) = seen
    assert not folder.exists()


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_a_variable_that_was_not_set_is_not_set_afterwards(gpu, monkeypatch, error):
    monkeypatch.delenv(tuned.CACHE)

    def run():
        tune()
        if error is not None:
            raise error("no more")

    with pytest.raises(error) if error else monkeypatch.context():
        tuned_choices(run)
    assert tuned.CACHE not in os.environ


def test_tune_that_keeps_nothing_is_an_error(gpu, cache):
    with pytest.raises(RuntimeError, match="kept nothing"):
        tuned_choices(lambda: None)


def test_the_choices_are_those_that_the_patch_makes(gpu, cache):
    with tune_check.chosen_by(shipped_choices()):
        assert reasons() == dict.fromkeys(OPS)
    found, _ = tuned_choices(lambda: tune(linear_gelu=4.0, linear_qkv=None))
    with tune_check.chosen_by(found):
        assert reasons() == {
            **dict.fromkeys(OPS),
            "linear_gelu": SLOW_GELU,
            "linear_qkv": f"failed its check on {ORIGIN}",
        }
        verdicts = found.of_gpu(GPU, CAPABILITY)
        assert [op for op in OPS if not verdicts[op].is_ours] == [op for op in OPS if reasons()[op]]


def test_choices_that_differ_are_reported(gpu):
    def choice(verdict):
        return Choices({}, {GPU: measured.Tuned({"linear_gelu": verdict}, {}, {})})

    fast, slow, failed = (Verdict(("X",), ours, 3.0) for ours in (2.0, 4.0, None))
    for shipped, tuned_verdict, is_other in ((fast, slow, True), (fast, failed, True), (slow, failed, False)):
        choices = compare_choices(choice(shipped), choice(tuned_verdict), GPU, CAPABILITY)
        assert [each.op for each in choices] == list(OPS)
        assert OpChoice("linear_gelu", shipped, tuned_verdict) in choices
        text = check_table(check(choices=choices))
        assert ("chosen otherwise: linear_gelu" in text) == is_other
        assert ("all are chosen alike" in text) != is_other
    lines = [line.split() for line in text.splitlines()]
    assert ["linear_gelu", "PyTorch's", "4.00", "3.00", "PyTorch's", "failed", "3.00"] in lines
    assert ["attention", "PyTorch's", "not", "measured", "PyTorch's", "not", "measured"] in lines
    ours = compare_choices(choice(None), choice(fast), GPU, CAPABILITY)  # where PyTorch's is taken, for want of any
    assert "chosen otherwise: linear_gelu" in check_table(check(choices=ours))


def check(shipped=100.0, tuned=100.0, choices=()):
    milliseconds = {SHIPPED: shipped, TUNED: tuned}
    return TuneCheck({"config": "tiny"}, describe_environment(CPU), 12.3, choices, milliseconds, {})


def tiny_check(**ours):
    options = check_tune.argparse.Namespace(config="tiny", layers=1, steps=2, repeats=2)
    return check_tune.measure(options, CPU, lambda: tune(**ours))


def test_every_turn_decides_anew_by_its_choices(gpu, cache, monkeypatch):
    """A block keeps what it decided: with a patch that outlives the exchange both steps would be the first one's."""
    asked, patch, choose = [], tune_check.patch, Call.choose
    monkeypatch.setattr(tune_check, "patch", lambda pipe: asked.append("patch") or patch(pipe))

    def noted(call, **options):
        asked.append(why_torch("linear_gelu", CUDA, torch.bfloat16))
        return choose(call, **options)

    monkeypatch.setattr(Call, "choose", noted)
    before = reasons()
    found = tiny_check(linear_gelu=4.0)
    turns = [set(group) for is_patch, group in itertools.groupby(asked, lambda each: each == "patch") if not is_patch]
    there = [{None}, {SLOW_GELU}]
    assert turns == [*there, *reversed(there), *there]
    assert reasons() == before
    assert found.settings["layers"] == 1
    assert found.settings["num_frames"] == 5
    assert set(found.milliseconds) == set(found.patch_summaries) == {SHIPPED, TUNED}
    assert all(value > 0 for value in found.milliseconds.values())
    assert all("1 blocks" in summary for summary in found.patch_summaries.values())


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_failing_step_leaves_the_choices_and_the_pipeline_as_they_were(gpu, cache, monkeypatch, turn):
    pipe = check_tune.build_pipeline(check_tune.CASES["tiny"], torch.float32, CPU, layers=1)
    before, forward, calls = reasons(), type(pipe.transformer).forward, itertools.count(1)

    def generate(pipe, **call):
        if next(calls) == turn:
            raise torch.OutOfMemoryError("no more")
        return timed_generation(pipe, **call)

    timed_generation = tune_check.timed_generation
    monkeypatch.setattr(tune_check, "timed_generation", generate)
    monkeypatch.setattr(check_tune, "build_pipeline", lambda *_, **__: pipe)
    with pytest.raises(torch.OutOfMemoryError):
        tiny_check(linear_gelu=4.0)
    assert reasons() == before
    assert "forward" not in vars(pipe.transformer)
    assert type(pipe.transformer).forward is forward
    with tune_check.patch(pipe):  # which takes none that is patched
        pass


@pytest.mark.parametrize(("milliseconds", "code"), [(99.0, 0), (101.9, 0), (102.1, 1)])
def test_a_step_that_is_more_than_2_percent_slower_fails(monkeypatch, tmp_path, capsys, milliseconds, code):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    verdict = Verdict(("X",), 2.0, 3.0)
    choices = [OpChoice("attention", verdict, verdict._replace(ours=4.0) if code else verdict)]
    monkeypatch.setattr(check_tune, "measure", lambda *_: check(tuned=milliseconds, choices=choices))
    assert check_tune.main(["--json", str(tmp_path / "tune.json")]) == code
    written = json.loads((tmp_path / "tune.json").read_text())
    assert written["milliseconds"] == {SHIPPED: 100.0, TUNED: milliseconds}
    assert written["tune_seconds"] == 12.3
    assert written["choices"][0][SHIPPED] == {"is_ours": True, "ours": 2.0, "rival": 3.0, "gpus": ["X"]}
    assert written["environment"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert f"{milliseconds - 100:+.2f}% (+2% is allowed)" in printed
    assert "tune: 12 s" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_is_one_line(capsys):
    with pytest.raises(SystemExit):
        check_tune.main([])
    assert "no CUDA GPU" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit) as end:
        check_tune.run_tune("tiny")  # the command's own error, and exit code
    assert end.value.code == 2
    assert "PyTorch finds none here" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_step_on_a_gpu_goes_by_its_choices(monkeypatch, tmp_path):
    monkeypatch.setenv(tuned.CACHE, str(tmp_path))
    options = check_tune.argparse.Namespace(config="tiny", layers=1, steps=2, repeats=2)
    name = torch.cuda.get_device_name(CUDA)
    found = check_tune.measure(options, CUDA, lambda: tune(name, linear_gelu=4.0))
    is_slow = {whose: "PyTorch's was faster on" in summary for whose, summary in found.patch_summaries.items()}
    assert is_slow == {SHIPPED: False, TUNED: True}
