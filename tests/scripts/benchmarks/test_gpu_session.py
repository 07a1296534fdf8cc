"""scripts/benchmarks/gpu_session.py: a step's figures reach the GPU's file even if other steps fail."""

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.benchmarks import end_to_end, gpu_session, ops, small_cards
from turbo_rcm_patch.bench import environment
from turbo_rcm_patch.bench.environment import describe_environment

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(gpu_session.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_session.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_session.torch.cuda, "get_device_name", lambda: "NVIDIA GeForce X/2 (test)")


def writes(text, code=0):
    """A step that writes a text where --json says, and exits with a code."""
    program = f"import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write({text!r}); sys.exit({code})"
    return "-c", program


def session(tmp_path, *only, options=()):
    folders = ["--results", str(tmp_path / "results"), "--logs", str(tmp_path / "logs")]
    return gpu_session.main([*folders, "--only", *only, *options])


def test_runs_are_kept_by_gpu_and_replaced_by_name(tmp_path, monkeypatch, capsys, gpu):
    steps = {"a": writes('{"x": 1}'), "b": writes('{"x": 2}', code=1), "c": ("-c", "print('hello'); exit(3)")}
    monkeypatch.setattr(gpu_session, "MEASUREMENTS", steps)
    monkeypatch.setattr(gpu_session, "CHECKS", {})
    assert session(tmp_path, "a", "c") == 1
    path = tmp_path / "results/nvidia-geforce-x-2-test.json"
    expected = {"gpu": "NVIDIA GeForce X/2 (test)", "tests": [], "runs": {"a": {"x": 1}}}
    assert json.loads(path.read_text()) == expected
    printed = capsys.readouterr().out
    assert "hello" in printed
    assert "failed 3" in printed
    assert (tmp_path / "logs/c.log").read_text() == "hello\n"

    assert session(tmp_path, "b") == 1  # its figures say what failed
    assert json.loads(path.read_text())["runs"] == {"a": {"x": 1}, "b": {"x": 2}}
    steps["a"] = writes('{"x": 3}')
    assert session(tmp_path, "a") == 0
    assert json.loads(path.read_text())["runs"] == {"a": {"x": 3}, "b": {"x": 2}}


def test_a_step_of_several_tiers_gives_a_run_for_each(tmp_path, monkeypatch, gpu):
    command = (
        *writes('{"exact": {"x": 1}, "block_sparse": {"x": 2}}', code=1),
        "--preset",
        "exact",
        "sparse",
        "block_sparse",
    )
    monkeypatch.setattr(gpu_session, "MEASUREMENTS", {"a-2-gpus": command, "b": writes('{"x": 3}')})
    monkeypatch.setattr(gpu_session, "CHECKS", {})
    assert session(tmp_path, "b", "a-2-gpus") == 1  # one tier failed after the others
    runs = json.loads((tmp_path / "results/nvidia-geforce-x-2-test.json").read_text())["runs"]
    assert list(runs.items()) == [("a-2-gpus", {"x": 1}), ("a-block-sparse-2-gpus", {"x": 2}), ("b", {"x": 3})]


OF_TIERS = f"""
import json, os, sys
presets = [part for part in sys.argv if part in {tuple(gpu_session.ENDINGS)}]
run = {{"alone": len(presets) == 1, "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}}
figures = dict.fromkeys(presets, run)
with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
    json.dump(figures if len(presets) > 1 else run, file)
"""  # figures of the shape that end_to_end.py writes


def test_one_run_of_a_step_is_measured_with_its_preset_alone(tmp_path, monkeypatch, capsys, gpu):
    command = ("-c", OF_TIERS, "--preset", "exact", "sparse", "block_sparse")
    monkeypatch.setattr(gpu_session, "MEASUREMENTS", {"a-2-gpus": command})
    monkeypatch.setattr(gpu_session, "CHECKS", {})
    path = tmp_path / "results/nvidia-geforce-x-2-test.json"

    def alone():
        return {name: run["alone"] for name, run in json.loads(path.read_text())["runs"].items()}

    assert session(tmp_path, "a-block-sparse-2-gpus") == 0
    assert alone() == {"a-block-sparse-2-gpus": True}
    assert session(tmp_path, "a-2-gpus") == 0
    assert alone() == {"a-2-gpus": False, "a-sparse-2-gpus": False, "a-block-sparse-2-gpus": False}
    assert session(tmp_path, "a-block-sparse-2-gpus", "a-sparse-2-gpus") == 0
    assert alone() == {"a-2-gpus": False, "a-sparse-2-gpus": True, "a-block-sparse-2-gpus": True}
    with pytest.raises(SystemExit):
        session(tmp_path, "a-quantized-2-gpus")
    assert "invalid choice: 'a-quantized-2-gpus' (choose from" in capsys.readouterr().err


def test_a_run_gets_the_gpus_that_its_step_needs(tmp_path, monkeypatch, gpu):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr(gpu_session, "MEASUREMENTS", {"a": ("-c", OF_TIERS, "--preset", "exact", "sparse")})
    monkeypatch.setattr(gpu_session, "CHECKS", {})
    monkeypatch.setattr(gpu_session, "GPUS", {"a": 2})
    assert session(tmp_path, "a-sparse", options=["--together"]) == 0
    runs = json.loads((tmp_path / "results/nvidia-geforce-x-2-test.json").read_text())["runs"]
    assert runs == {"a-sparse": {"alone": True, "gpus": "4,5"}}


def test_the_name_of_a_step_is_not_taken_for_a_run_of_another(monkeypatch):
    steps = {"a": ("--preset", "exact", "sparse"), "a-sparse": ("--preset", "sparse", "--steps", "1")}
    monkeypatch.setattr(gpu_session, "MEASUREMENTS", steps)
    chosen = gpu_session.chosen_by_name()
    assert (chosen["a"], chosen["a-sparse"]) == (("a", ""), ("a-sparse", ""))
    assert gpu_session.command_of(*chosen["a"]) == list(steps["a"])


def test_each_run_of_the_measurements_has_a_name_of_its_own_and_its_steps_command():
    names = [name for step in gpu_session.MEASUREMENTS for name in gpu_session.runs_of(step).values()]
    assert len(names) == len(set(names))
    assert set(names) <= set(gpu_session.chosen_by_name())
    step, preset = gpu_session.chosen_by_name()["wan2.2-5b-decoded-block-sparse-2-gpus"]
    assert (step, preset, gpu_session.GPUS[step]) == ("wan2.2-5b-decoded-2-gpus", "block_sparse", 2)
    assert gpu_session.command_of(step, preset)[-4:] == ["--preset", "block_sparse", "--ulysses", "2"]


def waits_for(mine, other):
    """A step that writes the GPUs that it sees, and waits until another step has written its own."""
    return (
        "-c",
        "import os, sys, time; from pathlib import Path\n"
        f"Path({str(mine)!r}).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        f"while not Path({str(other)!r}).exists(): time.sleep(0.01)",
    )


def test_together_steps_run_at_the_same_time_on_gpus_of_their_own(tmp_path, monkeypatch, gpu):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    a, b, c = (tmp_path / name for name in "abc")
    steps = {"a": waits_for(a, b), "b": waits_for(b, a), "c": waits_for(c, c)}
    monkeypatch.setattr(gpu_session, "MEASUREMENTS", {})
    monkeypatch.setattr(gpu_session, "CHECKS", steps)
    monkeypatch.setattr(gpu_session, "GPUS", {"b": 2, "c": 3})
    assert session(tmp_path, *steps, options=["--together", "--seconds", "60"]) == 0
    assert a.read_text() == "4"
    assert b.read_text() == "5,6"
    assert sorted(c.read_text().split(",")) == ["4", "5", "6"]


def test_one_step_after_the_other_sees_all_gpus_and_one_that_is_cut_off_keeps_its_figures(
    tmp_path, monkeypatch, capsys, gpu
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    a, b = (tmp_path / name for name in "ab")
    _, waits = waits_for(a, b)  # which does not begin
    program = f"import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write('{{\"exact\": {{}}}}')\n{waits}"
    monkeypatch.setattr(gpu_session, "CHECKS", {})
    steps = {"a": ("-c", program, "--preset", "exact", "sparse"), "b": waits_for(b, a)}
    monkeypatch.setattr(gpu_session, "MEASUREMENTS", steps)
    assert session(tmp_path, *steps, options=["--seconds", "3"]) == 1
    assert a.read_text() == "4,5"
    assert not b.exists()
    printed = capsys.readouterr().out
    assert "a     cut off" in printed
    assert "Time was up before these began: b" in printed
    assert json.loads((tmp_path / "results/nvidia-geforce-x-2-test.json").read_text())["runs"] == {"a": {}}


def test_figures_of_an_earlier_session_are_not_taken_for_new_ones(tmp_path, monkeypatch, gpu):
    monkeypatch.setattr(gpu_session, "CHECKS", {})
    monkeypatch.setattr(gpu_session, "MEASUREMENTS", {"a": ("-c", "exit(1)")})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a.json").write_text('{"x": "old"}')
    assert session(tmp_path, "a") == 1
    assert not list((tmp_path / "results").iterdir())


def test_tests_are_kept_with_their_versions_and_commit(tmp_path, monkeypatch, gpu):
    steps = {"tests": ("-c", "print('1 failed, 70 passed, 2 skipped in 3.21s'); exit(1)")}
    monkeypatch.setattr(gpu_session, "CHECKS", steps)
    monkeypatch.setattr(gpu_session, "MEASUREMENTS", {})
    monkeypatch.setattr(gpu_session, "describe_environment", lambda device: describe_environment("cpu"))
    monkeypatch.setenv("TURBO_RCM_PATCH_COMMIT", "0123abc")
    path = tmp_path / "results/nvidia-geforce-x-2-test.json"
    path.parent.mkdir()
    path.write_text('{"gpu": "NVIDIA GeForce X/2 (test)", "runs": {}}')  # of a session before tests were kept
    assert session(tmp_path, "tests") == 1
    (entry,) = json.loads(path.read_text())["tests"]
    assert {key: entry[key] for key in ("ok", "passed", "failed", "skipped")} == {
        "ok": False,
        "passed": 70,
        "failed": 1,
        "skipped": 2,
    }
    assert entry["environment"]["commit"] == "0123abc"

    steps["tests"] = ("-c", "print('71 passed in 3.21s')")
    assert session(tmp_path, "tests") == 0
    (entry,) = json.loads(path.read_text())["tests"]
    assert (entry["ok"], entry["passed"]) == (True, 71)

    failing = "import sys; print('2 failed, 70 passed in 3.21s'); sys.exit(1)"
    for steps["tests"] in (("-c", failing), ("-c", failing)):
        assert session(tmp_path, "tests") == 1
        assert [e["passed"] for e in json.loads(path.read_text())["tests"]] == [71, 70]
    steps["tests"] = ("-c", "print('72 passed in 3.21s')")
    assert session(tmp_path, "tests") == 0
    assert [e["passed"] for e in json.loads(path.read_text())["tests"]] == [72]
    other = replace(describe_environment("cpu"), triton="0.1")
    monkeypatch.setattr(gpu_session, "describe_environment", lambda device: other)
    assert session(tmp_path, "tests") == 0
    assert len(json.loads(path.read_text())["tests"]) == 2


@pytest.mark.parametrize("code", [0, 1])
def test_what_compute_sanitizer_says_is_kept(tmp_path, monkeypatch, gpu, code):
    monkeypatch.setattr(gpu_session, "CHECKS", {"racecheck": ("-c", f"exit({code})")})
    monkeypatch.setattr(gpu_session, "describe_environment", lambda device: describe_environment("cpu"))
    monkeypatch.setenv("TURBO_RCM_PATCH_COMMIT", "0123abc")
    assert session(tmp_path, "racecheck") == code
    kept = json.loads((tmp_path / "results/nvidia-geforce-x-2-test.json").read_text())["sanitizers"]
    assert (kept["racecheck"]["ok"], kept["racecheck"]["environment"]["commit"]) == (code == 0, "0123abc")


def test_steps_for_more_gpus_are_left_out_unless_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(gpu_session, "CHECKS", {})
    monkeypatch.setattr(gpu_session, "MEASUREMENTS", {"one": (), "two": ()})
    monkeypatch.setattr(gpu_session, "GPUS", {"two": 2})
    assert list(gpu_session.chosen_steps(None, 1)) == ["one"]
    assert "two is left out: it needs 2 GPUs" in capsys.readouterr().out
    assert list(gpu_session.chosen_steps(None, 2)) == ["one", "two"]
    assert list(gpu_session.chosen_steps(["two"], 1)) == ["two"]


def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("TURBO_RCM_PATCH_COMMIT", raising=False)
    assert environment._commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    assert environment._commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert environment._commit(tmp_path) == f"{commit}-dirty"


def test_every_measurement_has_the_options_that_are_used(monkeypatch, capsys):
    used: dict[tuple[str, ...], set[str]] = {}
    for command in gpu_session.MEASUREMENTS.values():
        is_option = [part.startswith("--") for part in command]
        program = command[: is_option.index(True) if True in is_option else None]
        used.setdefault(program, {"--json"}).update(part for part in command if part.startswith("--"))
    for program, options in used.items():
        help_text = help_of(program, monkeypatch, capsys)
        assert all(option in help_text for option in options)


def help_of(program, monkeypatch, capsys):
    """Within this process: each of its own would import PyTorch and diffusers anew."""
    if program[0] == "-m":
        run, name, arguments = runpy.run_module, program[1], program[2:]
    else:
        run, name, arguments = runpy.run_path, str(ROOT / program[0]), program[1:]
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--help"])
    with pytest.raises(SystemExit) as end:
        run(name, run_name="__main__")
    assert end.value.code == 0
    return capsys.readouterr().out


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_session.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_session.main(["--results", str(tmp_path / "results")])
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_ops_of_each_tier_are_timed(gpu):
    steps = ("ops", "ops-quantized", "ops-sparse")
    tiers = {tier for step in steps for tier in ops.parse_options(list(gpu_session.MEASUREMENTS[step][1:])).tier}
    assert tiers == {case.tier.name for case in ops.CASES}


@pytest.mark.parametrize(
    ("step", "size"), [("ltx2-19b-sparse", (512, 768, 121)), ("ltx2-19b-1024p-sparse", (1024, 1792, 121))]
)
def test_whole_videos_of_ltx2_have_all_layers_beside_torch_compile(step, size):
    options = end_to_end.parse_options(list(gpu_session.MEASUREMENTS[step][1:]))
    case = end_to_end.CASES[options.config]
    chosen = (options.height or case.height, options.width or case.width, options.frames or case.frames)
    assert (options.config, chosen) == ("ltx2-19b", size)
    assert options.decode
    assert (options.layers, options.steps, options.preset) == (None, 4, ["sparse"])
    assert not options.no_compile
    assert list(gpu_session.runs_of(step).values()) == [step]


def test_a_whole_video_of_both_experts_is_made_from_a_prompt():
    step = "wan2.2-a14b-decoded"
    options = end_to_end.parse_options(list(gpu_session.MEASUREMENTS[step][1:]))
    assert (options.config, options.layers, options.steps, options.preset) == ("wan2.2-a14b", None, 4, ["quantized"])
    assert (options.height, options.width, options.frames) == (480, 832, None)
    assert options.prompt
    assert options.decode
    assert options.repeats == 1
    assert list(gpu_session.runs_of(step).values()) == [step]


def test_a_plan_of_ltx2_is_measured_in_one_tier_without_rivals(gpu):
    step = "small-cards-ltx2-19b"
    options = small_cards.parse_options(list(gpu_session.MEASUREMENTS[step][1:]))
    assert (options.config, options.vram, options.presets, options.rivals) == ("ltx2-19b", ["24GB"], ["quantized"], [])
    case = small_cards.CASES[options.config]
    assert (options.height, options.width, options.frames) == (case.height, case.width, case.frames)
    assert options.repeats == 1
    assert f"{step}-diffusers" not in gpu_session.MEASUREMENTS
