"""`turbo-rcm tune` times our kernels and their fallbacks at a model's shapes, and writes a row for each."""

import json
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from scripts.benchmarks.contests import conv, exact
from tests.tiny_wan import tiny_wan_pipeline
from tests.tune_times import CONVOLUTION, small_shapes
from turbo_rcm_patch.bench import ops, ops_quantized, trials, tune, tune_tiers
from turbo_rcm_patch.bench.ops import OpKey, OpResult, Timing, error_limit, measure_errors
from turbo_rcm_patch.bench.tune import cases, row_of, rows_of, shapes_of_case, shapes_of_folder
from turbo_rcm_patch.kernels import FP8, INT8, Quantized
from turbo_rcm_patch.kernels.choice.measured import LINEARS_8BIT, OPS, TIER_OPS
from turbo_rcm_patch.tiers import EXACT, QUANTIZED

CPU = torch.device("cpu")
SMALL = small_shapes(head_dim=16, convolutions=[CONVOLUTION, (2, 3, 4, 8, 8, 1, 3, 2, 1), (2, 3, 4, 8, 8, 3, 1, 1, 2)])


def tokens_of(shapes):
    return next(shape[1] for op, shape in shapes.ops if op == "attention")


def test_the_shapes_are_those_that_the_results_file_has_too():
    names = [case.name for case in cases(shapes_of_case("wan2.1-1.3b"))]
    names += [case.name for case in cases(shapes_of_case("wan2.1-14b"))]
    small = [case.name for case in exact.CASES if " 7800×" not in case.name and case.key.op in OPS]
    assert set(small) <= set(names)
    assert {case.name for case in conv.CASES[:12]} <= set(names)
    assert {case.name for case in conv.CASES[12:]} <= {case.name for case in cases(shapes_of_case("wan2.2-5b"))}
    assert tokens_of(shapes_of_case("wan2.2-5b")) == 31 * 22 * 40
    assert tokens_of(shapes_of_case("wan2.1-1.3b", (None, None, 17))) == 7800


def test_a_key_is_read_from_results_as_it_is_written():
    for key in (OpKey("linear_skip", (32760, 1536, 1536)), OpKey("linear_skip(mass=0.9)", (7,)), OpKey("small")):
        assert OpKey.parse(str(key)) == key
    assert str(OpKey("linear_skip", (7, 5, 3))) == "linear_skip 7×5×3"


def test_the_shapes_of_a_folder(tmp_path):
    pipe = tiny_wan_pipeline("t2v")
    pipe.transformer.save_pretrained(tmp_path / "transformer")
    config = pipe.transformer.config
    shapes = shapes_of_folder(tmp_path, (64, 96, 9))
    tokens, C = 3 * 4 * 6, config.num_attention_heads * config.attention_head_dim
    assert shapes.ops[0] == ("attention", (config.num_attention_heads, tokens, tokens, config.attention_head_dim))
    assert ("linear_gelu", (tokens, config.ffn_dim, C)) in shapes.ops
    with pytest.raises(ValueError, match="no such file or folder"):
        shapes_of_folder(tmp_path / "none")
    for config, error in (
        ({}, r"config\.json is of a None; supported: Wan"),
        ({"_class_name": "WanTransformer3DModel"}, r"config\.json has no num_attention_heads and no ffn_dim\."),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=error):
            shapes_of_folder(tmp_path)


@pytest.mark.parametrize(
    ("z_dim", "scale", "size", "tokens"), [(16, 8, "480x832x81", 21 * 30 * 52), (48, 16, "704x1280x121", 31 * 22 * 40)]
)
def test_the_usual_size_of_a_folder_is_that_of_its_vae(tmp_path, z_dim, scale, size, tokens):
    tiny_wan_pipeline("t2v").transformer.save_pretrained(tmp_path / "transformer")
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/config.json").write_text(json.dumps({"z_dim": z_dim, "scale_factor_spatial": scale}))
    shapes = shapes_of_folder(tmp_path)
    assert (shapes.size, tokens_of(shapes)) == (size, tokens)
    assert shapes_of_folder(tmp_path, (None, None, 17)).size == f"{size.rpartition('x')[0]}x17"


EXACT_CASES = [case for case in cases(SMALL) if case.tier == EXACT]
TIER_SHAPES = small_shapes(tokens=600)
TIER_CASES = [case for case in cases(TIER_SHAPES) if case.tier != EXACT]


@pytest.mark.parametrize("case", EXACT_CASES, ids=lambda case: case.name)
def test_ours_and_what_runs_otherwise_are_right(case):
    contest = case.build(CPU, lambda function: function)
    errors = measure_errors(contest)
    op = case.key.op
    assert set(errors) == {op, tune.OPS[op].rival}
    assert all(0 < error < torch.finfo(torch.bfloat16).eps for error in errors.values())


@pytest.fixture
def attention(monkeypatch):
    """The self-attention's contest on a CPU where PyTorch takes the formula by itself."""
    monkeypatch.setattr(tune, "chosen_backend", lambda q, k, v: "math")
    return next(cases(SMALL)).build(CPU, lambda function: function)


def test_backends_of_pytorchs_attention_that_it_does_not_take_by_itself(attention, monkeypatch):
    """On a CPU PyTorch has one backend besides the formula."""
    assert list(attention.alternatives) == ["PyTorch SDPA (FlashAttention)"]
    errors = measure_errors(attention)
    assert 0 < errors["PyTorch SDPA (FlashAttention)"] < torch.finfo(torch.bfloat16).eps
    monkeypatch.setattr(tune, "chosen_backend", lambda q, k, v: "FlashAttention")
    assert not next(cases(SMALL)).build(CPU, lambda function: function).alternatives


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_backend_that_breaks_the_gpu_is_not_left_out(attention, monkeypatch, error):
    def run(name, attend):
        raise error("no more")

    monkeypatch.setattr(tune, "_in_backend", run)
    with pytest.raises(error):
        next(cases(SMALL)).build(CPU, lambda function: function)


def test_a_backend_that_errs_too_much_is_not_timed(attention):
    def build(*arguments):
        (name,) = attention.alternatives
        return replace(attention, alternatives={name: lambda: 1.1 * attention.fallback()})

    case = replace(next(cases(SMALL)), build=build)
    result = asdict(tune.measure(case, CPU))
    assert "is above the" in result["timings"]["PyTorch SDPA (FlashAttention)"]["refused"]
    row = row_of(case.key, result)
    assert row["rival_name"] == "PyTorch SDPA"
    assert row["ours"] is not None


@pytest.mark.parametrize(("milliseconds", "expected"), [(1.95, "cuDNN"), (1.97, None), (2.5, None)])
def test_a_backend_is_taken_where_it_is_faster_than_noise(milliseconds, expected):
    case = next(cases(SMALL))
    rivals = {"PyTorch SDPA": 2.0, "PyTorch SDPA (cuDNN)": milliseconds}
    timings = {name: Timing(False, 1e-3, time) for name, time in rivals.items()}
    row = row_of(case.key, asdict(OpResult(case.name, {**timings, "ours": Timing(True, 1e-3, 3.0)}, "ours")))
    assert row.get("sdpa") == expected
    assert row["rival"] == min(rivals.values())


def test_every_op_is_measured():
    assert {case.key.op for case in EXACT_CASES} == set(OPS)
    assert {case.key.op for case in TIER_CASES} == set(TIER_OPS)
    of_small_heads = {case.key.op for case in cases(SMALL)} - set(OPS)
    assert of_small_heads == {op for op, part in TIER_OPS.items() if part == LINEARS_8BIT}  # attention has no kernel


@pytest.mark.parametrize("case", TIER_CASES, ids=lambda case: case.name)
def test_a_tiers_op_is_within_its_tiers_limit(case):
    contest = case.build(CPU, lambda function: function)
    assert not contest.rivals
    (error,) = measure_errors(contest).values()
    limit = error_limit(contest, {}, case.tier.limits)
    assert torch.finfo(torch.bfloat16).eps / 2 < error <= limit
    shifted = replace(contest, oracle=lambda rows: contest.oracle((rows + contest.tokens // 2) % contest.tokens))
    assert min(measure_errors(shifted).values()) > limit


@pytest.mark.parametrize("format", [INT8, FP8])
def test_linears_have_the_formats_that_the_patch_takes(monkeypatch, format):
    """A GPU older than sm_89 takes only int8, and no GELU in 8 bits."""
    capability = (8, 0) if format == INT8 else (9, 0)
    monkeypatch.setattr(tune_tiers, "capability_of", lambda device: capability)
    found, quantize_weight = [], ops_quantized.quantize_weight
    noted = lambda weight, format: found.append(format) or quantize_weight(weight, format)  # noqa: E731
    monkeypatch.setattr(ops_quantized, "quantize_weight", noted)
    contests = {case.key.op: case.build(CPU, lambda function: function) for case in TIER_CASES}
    assert found == [format, INT8, INT8, INT8, INT8]  # ffn.net.2, ffn.net.0, q, k and v
    assert isinstance(contests["linear_gelu_8bit"].ours["linear_gelu"](), Quantized) == (format == FP8)
    for op in ("linear_skip_8bit", "linear_gelu_8bit", "linear_qkv_8bit"):
        (error,) = measure_errors(contests[op]).values()
        assert error <= QUANTIZED.limits.part


def test_a_tiers_op_is_beside_what_the_exact_tier_takes():
    """The exact tier takes the faster one of ours and PyTorch's, and two norms before attention."""
    times = {"attention": (4.0, 3.0), "linear_skip": (None, 5.0), "linear_gelu": (2.0, 9.0)}

    def measure(case):
        op = case.key.op
        if op == "linear_qkv":
            raise ValueError("too much shared memory")
        if case.tier == EXACT:
            return result(case, *times.get(op, (1.0, 1.0)))
        timings = {"ours": Timing(True, 1e-2, 1.5)}
        timings |= {"norms": Timing(False, None, 0.25)} if op == "attention_8bit" else {}
        return OpResult(case.name, timings, None if op == "linear_gelu_8bit" else "ours")

    rows = rows_of(cases(TIER_SHAPES), measure, print)
    found = {row["op"]: (row["ours"], row["rival"], row["rival_name"]) for row in rows if row["op"] in TIER_OPS}
    assert found == {
        "attention_8bit": (1.5, 3.25, "exact tier"),
        "sparse_linear_attention": (1.5, 3.0, "exact tier"),
        "block_sparse_attention": (1.5, 3.0, "exact tier"),
        "linear_skip_8bit": (1.5, 5.0, "exact tier"),
        "linear_gelu_8bit": (None, 2.0, "exact tier"),
        "linear_qkv_8bit": (1.5, None, "exact tier"),
    }


@pytest.mark.parametrize(("index", "rounds"), [(0, tune.ROUNDS), (-1, tune.TIER_ROUNDS)])
def test_the_other_tiers_are_timed_in_fewer_rounds(monkeypatch, index, rounds):
    asked = []
    monkeypatch.setattr(ops, "run_case", lambda *_, **options: asked.append(options["rounds"]))
    tune.measure(list(cases(SMALL))[index], CPU)
    assert asked == [rounds]


def result(case, ours, rival):
    timings = {"ours": Timing(True, 1e-3, ours), "rival": Timing(False, 1e-3, rival), "part": Timing(False, None, 1e-9)}
    return OpResult(case.name, timings, None if ours is None else "ours")


def test_a_row_a_case_also_where_a_kernel_fails():
    def measure(case):
        if case.key.op.startswith("linear_gelu"):
            raise ValueError("too much shared memory")
        return result(case, None if case.key.op.startswith("linear_qkv") else 1.23456, 2.0)

    reported = []
    rows = rows_of(cases(SMALL), measure, reported.append)
    assert [row["op"] for row in rows] == [case.key.op for case in cases(SMALL)]
    assert rows[0] == {
        "op": "attention",
        "dtype": "bfloat16",
        "shape": [2, 70, 70, 16],
        "ours": 1.2346,
        "rival": 2.0,
        "rival_name": "rival",
    }
    by_op = {row["op"]: row for row in rows}
    assert (by_op["linear_gelu"]["ours"], by_op["linear_gelu"]["rival"]) == (None, None)
    assert (by_op["linear_qkv"]["ours"], by_op["linear_qkv"]["rival"]) == (None, 2.0)
    failure = "ValueError: too much shared memory"
    assert reported == [f"linear_gelu 70×40×32: {failure}", f"linear_gelu_8bit 70×40×32: {failure}"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError, KeyboardInterrupt])
def test_after_these_nothing_is_measured_any_more(error):
    def measure(case):
        raise error("no more")

    with pytest.raises(error):
        rows_of(cases(SMALL), measure, print)


def test_what_errs_too_much_is_not_timed():
    case = next(case for case in cases(SMALL) if case.key.op == "linear_gelu")
    right = tune.measure(case, CPU)
    assert right.best == "linear_gelu"
    assert row_of(case.key, asdict(right))["rival_name"] == "PyTorch linear, Triton GELU"

    def build(*arguments):
        contest = case.build(*arguments)
        return replace(contest, ours={"linear_gelu": lambda: 1.1 * contest.fallback()})

    wrong = tune.measure(replace(case, build=build), CPU)
    assert wrong.best is None
    assert row_of(case.key, asdict(wrong))["ours"] is None


@pytest.mark.gpu
def test_on_a_gpu_all_is_timed():
    reported = []
    rows = rows_of(cases(TIER_SHAPES), partial(tune.measure, device=torch.device("cuda")), reported.append)
    assert reported == []
    assert [row["op"] for row in rows if None in (row["ours"], row["rival"])] == []


def test_the_tiers_ops_are_timed_without_what_only_the_benchmark_compares_them_with():
    by_op = {case.key.op: case for case in cases(small_shapes(tokens=1024))}
    for op, beside in (("block_sparse_attention", set()), ("attention_8bit", {tune_tiers.NORMS})):
        contest = by_op[op].build(CPU, lambda function: function)
        assert (contest.rivals, set(contest.partial)) == ({}, beside)


def test_a_tiers_op_is_timed_at_the_largest_of_the_exact_ops_shapes():
    keys = {case.key.op: case.key.shape for case in cases(shapes_of_case("wan2.1-1.3b"))}
    assert keys["linear_skip_8bit"] == (32760, 1536, 8960)
    assert keys["linear_qkv_8bit"] == (32760, 1536, 1536)
    assert keys["block_sparse_attention"] == (12, 32760, 128)


@pytest.mark.parametrize("op", sorted(tune.OPS))
def test_a_kernel_that_only_tune_may_choose_is_tried_in_every_contest(monkeypatch, op):
    """The kernel is the reference here, under another name."""
    launched, lists = [], tune.OPS[op].lists
    reference = lists[-1].kernels[-1]

    def launch(*args, **options):
        launched.append(op)
        return reference.launch(*args, **options)

    one = replace(reference, name="tried", launch=launch, by_tune=True)
    for known in lists:
        monkeypatch.setitem(vars(known), "kernels", (one, *known.kernels))
    case = next(case for case in cases(TIER_SHAPES) if case.key.op == op)
    contest = case.build(CPU, lambda function: function)
    launched.clear()
    contest.alternatives["tried"]()
    assert launched == [op]
    timings = {"tried": {"milliseconds": 1.5}, "ours": {"milliseconds": 2.0}}
    assert trials.times_of_trials(lists, timings) == {"tried": 1.5}
