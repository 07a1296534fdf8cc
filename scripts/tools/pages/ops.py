"""Ops, attention modules, memory traffic, first steps and videos, host time, a memory cap and GPU tests, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from turbo_rcm_patch.bench.ops import OpKey
from turbo_rcm_patch.bench.ops_quantized import OURS_EXACT
from turbo_rcm_patch.bench.ops_sparse import DENSE

from .cells import marked, table_of
from .charts import module_of

OPS_HEADER = ("op, bf16", "ours, ms", "rival", "rival, ms", "speed-up", "target", "error, ours / rival")
OPS_QUANTIZED_HEADER, OPS_SPARSE_HEADER = (("op, 8 bits", *OPS_HEADER[1:]), ("op, sparse", *OPS_HEADER[1:]))
TRAFFIC_HEADER = ("what", "implementation", "read, MB", "written, MB", "passes", "rel. L2 to fp32")
TESTS_HEADER = ("torch", "triton", "diffusers", "commit", "GPU tests passed", "failed")


def tests_table(tests: list[dict]) -> str:
    """Return a row per pair of torch and triton with which the GPU tests ran."""
    rows = []
    for entry in tests:
        environment = entry["environment"]
        versions = [environment[name] for name in ("torch", "triton", "diffusers")]
        failed = sum(entry.get(word, 0) for word in ("failed", "error", "errors"))
        cells = [*versions, (environment.get("commit") or "")[:12], str(entry.get("passed", 0))]
        cells.append(marked(str(failed), not entry["ok"]))
        rows.append(cells)
    return table_of(TESTS_HEADER, rows)


def sanitizers_sentence(sanitizers: dict) -> str:
    """Return a sentence on the tools of compute-sanitizer that passed all kernels and the commit, or "" if none ran."""
    said = []
    for tool, run in sanitizers.items():
        verdict = "passes" if run["ok"] else "**fails**"
        said.append(f"{tool} {verdict} at commit {(run['environment'].get('commit') or 'unknown')[:12]}")
    return f"All kernels under compute-sanitizer: {', '.join(said)}.\n" if said else ""


DECODE, FIRST_DECODE = "first patched decode", 10  # seconds


def first_step(run: dict) -> str:
    empty, filled = (run["seconds"][cache] for cache in ("empty cache", "filled cache"))
    text = (
        f"The first patched step of {run['settings']['config']} in a new process takes {empty['first patched']:.1f} s "
        f"with an empty Triton cache, which compiles the kernels, and {filled['first patched']:.1f} s with a filled one"
    )
    if DECODE in empty:
        seconds = f"{empty[DECODE]:.1f} s"
        missed = empty[DECODE] > FIRST_DECODE
        text += f"; the first decode {marked(seconds, missed)} and {filled[DECODE]:.1f} s "
        text += f"({FIRST_DECODE} s are wanted at most)"
    return text + ".\n"


MORE_SECONDS = 3  # that a process's first video may take more than its second
FIRST_VIDEO_HEADER = ("tier", "build, s", "patch, s", "first video, s", "second video, s", "more, s")
STAGES = ("text encoder", "steps", "VAE decode", "rest")


def first_video_table(run: dict) -> str:
    """Return the page's part on the first two videos of a process, a row per tier.

    It also shows in which stages the first video takes longer.
    """
    settings = run["settings"]
    size = f"{settings['frames']}×{settings['height']}×{settings['width']}, {settings['steps']} steps"
    rows = []
    for tier, one in run["first_videos"].items():
        first, second = one["first"]["total"], one["second"]["total"]
        more = marked(f"{first - second:.2f}", first - second > MORE_SECONDS)
        stages = map(float.__sub__, _stage_seconds(one["first"]), _stage_seconds(one["second"]))
        figures = [one["build"], one["patch"], first, second]
        rows.append([tier, *(f"{value:.2f}" for value in figures), more, *(f"{value:.2f}" for value in stages)])
    return (
        f"The first video of a new process with a filled Triton cache: {settings['config']}, {size}, from a prompt to "
        f"frames, with the text encoder patched too. Building and patching the pipeline are no part of it. It may take "
        f"{MORE_SECONDS} s more than the second one at most; the last columns say in which stages it takes longer:\n\n"
        + table_of((*FIRST_VIDEO_HEADER, *(f"more, {stage}" for stage in STAGES)), rows)
    )


def _stage_seconds(timings: dict) -> tuple[float, ...]:
    """Return the seconds of a video's STAGES."""
    stages = timings["text_encoding"], sum(timings["steps"]), timings["vae_decode"]
    return *stages, timings["total"] - sum(stages)


HOST_TIME = {"wan2.1-1.3b": 1.0}  # milliseconds of Python a block that are wanted at most


def host_time(run: dict) -> str:
    config, ranks = run["settings"]["config"], run["settings"].get("ulysses", 1)
    most = HOST_TIME.get(config)
    cells = [
        marked(f"{name} {value:.2f} ms", name != "unpatched" and most is not None and value > most)
        for name, value in run["milliseconds"].items()
    ]
    where = f" on one of {ranks} GPUs that share the tokens" if ranks > 1 else ""
    wanted = f" ({most:g} ms is wanted at most)" if most is not None else ""
    return (
        f"The time of Python for the launches of a block of {config}{where}, without CUDA graphs unless said: "
        f"{', '.join(cells)}{wanted}.\n"
    )


def exchange_table(run: dict) -> str:
    """Return the parts of a self-attention that several GPUs share."""
    settings = run["settings"]
    size = f"{settings['heads']}×{settings['tokens']}×{settings['head_dim']} on {settings['ulysses']} GPUs"
    return table_of(
        [f"self-attention of {size}", "ms"], [[name, f"{ms:.3f}"] for name, ms in run["milliseconds"].items()]
    )


GB = 10**9
WEIGHTS = 0.55  # of bf16's, that weights in 8 bits may take of the GPU's memory


def memory_cap(run: dict) -> str:
    settings, weights = run["settings"], run["weight_bytes"] / run["bf16_weight_bytes"]
    size = f"{settings['config']}, {settings['frames']}×{settings['height']}×{settings['width']}"
    return (
        f"With a cap of {run['cap_bytes'] / GB:g} GB on the GPU's memory, a step of {size}, in 8 bits "
        f"{_capped_step(run)}; its weights take {run['weight_bytes'] / GB:.1f} GB there, "
        f"{marked(f'{weights:.2f}×', weights > WEIGHTS)} those in bf16 ({WEIGHTS}× is wanted at most).\n"
    )


def _capped_step(run: dict) -> str:
    if run["step_seconds"] is None:
        return "**does not fit**"
    result = "" if run["finite"] else ", and its result is **not finite**"
    return f"takes {run['step_seconds']:.2f} s and {run['peak_bytes'] / GB:.1f} GB at its peak{result}"


GIB = 2**30
OFFLOADED = 1.1  # times the step with resident weights that a step with offloading may take


def group_offload_table(run: dict) -> str:
    """Return the page's part on steps with diffusers' group offloading."""
    settings = run["settings"]
    size = f"{settings['config']} ({settings['layers']} layers), {settings['frames']}×{settings['height']}"
    steps = {(row["tier"], row["weights"]): row["step_seconds"] for row in run["offloaded_steps"]}
    rows = [
        [
            row["tier"],
            row["weights"],
            f"{row['step_seconds']:.2f}",
            _over_resident(row["step_seconds"], steps.get((row["tier"], "resident"))),
            f"{row['peak_bytes'] / GIB:.2f}",
            f"{row['bytes_between_steps'] / GIB:.2f}",
        ]
        for row in run["offloaded_steps"]
    ]
    variables = " ".join(f"{name}={value}" for name, value in settings.get("variables", {}).items())
    return (
        f"Steps of {size}×{settings['width']} with random weights, resident and with diffusers' block-level group "
        f"offloading on a stream{f', with `{variables}`' if variables else ''}; the median of {settings['repeats']}. "
        f"At most {OFFLOADED:.2f}× the resident step is wanted:\n\n"
        + table_of(["tier", "weights", "step, s", "over resident", "peak, GiB", "on the GPU between steps, GiB"], rows)
    )


def _over_resident(step: float, resident: float | None) -> str:
    """Return a step's time over that of its tier with resident weights, with ✗ where it is above the limit."""
    return "" if resident is None else marked(f"{step / resident:.2f}×", step > OFFLOADED * resident)


def ops_table(run: dict, header: Sequence[str] = OPS_HEADER) -> str:
    rows = [row for result in run["results"] for row in op_rows(result)]
    return (
        "Single ops. Each is checked against an fp64 oracle before it is timed. They run as CUDA graphs in turns. "
        f"Times are medians of {run['rounds']} rounds. "
        f"A copy on this GPU moves {run['copy_bandwidth'] / 1e12:.2f} TB/s:\n\n" + table_of(header, rows)
    )


def op_rows(result: dict) -> list[list[str]]:
    """Return a row for each rival of an op. Its case also names the share of the key blocks that it keeps."""
    best, case = result["best"], result["case"]
    if result.get("kept") is not None:
        case += f", {100 * result['kept']:.0f} % kept"
    if best is None:
        return [[case, "refused: less accurate than allowed", *[""] * (len(OPS_HEADER) - 2)]]
    timings, rows = result["timings"], []
    most, least = result.get("most"), result.get("least")
    ours = timings[best]["milliseconds"]
    shown = marked(f"{ours:.3f}", ours > (most or ours))
    if rate := result.get("teraflops"):
        shown += f" ({marked(f'{rate:.0f}', rate < (least or rate))} TFLOP/s)"
    for index, (rival, speedup) in enumerate([*result["speedups"].items()] or [("", None)]):  # a rival may not run
        label = [case, shown] if index == 0 else ["", ""]
        target = result["targets"].get(rival)
        figure = "" if speedup is None else marked(f"{speedup:.3f}", target is not None and speedup < target)
        timing = timings.get(rival, {"milliseconds": None, "error": None})  # a copy has no timing of its own
        rival_time = "" if timing["milliseconds"] is None else f"{timing['milliseconds']:.3f}"
        errors = [timings[best]["error"] if index == 0 or timing["error"] is not None else None, timing["error"]]
        asked = [] if target is None else [str(target)]
        asked += [f"{most:g} ms"] if most is not None and index == 0 else []
        asked += [f"{least:g} TFLOP/s"] if least is not None and index == 0 else []
        rows.append([*label, rival, rival_time, figure, " / ".join(asked), _each(errors)])
    return rows


def _each(errors: Sequence[float | None]) -> str:
    """Return the measured errors as text. Ours stands alone if the rival is compared only in time."""
    return " / ".join(f"{error:.1e}" for error in errors if error is not None)


def sparse_attention_sentence(runs: dict) -> str:
    """Return the write-up's sentence that compares the whole sparse attention with dense ones, timed in turns.

    It is about the first sizes of the sparse attention.
    """
    results = (result for name in ("ops-sparse", "ops-quantized") for result in runs[name]["results"])
    rows = {OpKey.parse(result["case"]): result for result in results}
    key = next(key for key in rows if key.op == "norms_sparse_linear_attention")
    sparse, quantized = rows[key], rows[key._replace(op="norms_attention_8bit")]
    heads, tokens, head_dim = key.shape
    dense, exact = _milliseconds(sparse, DENSE), _milliseconds(quantized, OURS_EXACT)
    ours, in_8_bits = (_milliseconds(row, row["best"]) for row in (sparse, quantized))
    return (
        f"One self-attention with its norms and RoPE ({heads} heads of {head_dim}, {tokens} tokens): exact {exact} ms "
        f"beside {in_8_bits} in 8 bits, and sparse {ours} beside {dense} in 8 bits; each pair was timed in turns.\n"
    )


def _milliseconds(result: dict, contender: str) -> str:
    return f"{result['timings'][contender]['milliseconds']:.2f}"


def traffic_table(runs: list[dict]) -> str:
    rows = []
    for run in runs:
        settings = run["settings"]
        name = f"{settings['case']}{' of ' + settings['config'] if 'config' in settings else ''}"
        for index, one in enumerate(run["implementations"]):
            label = f"{name}, {settings['tokens']}×{settings['dim']}" if index == 0 else ""
            figures = [f"{one[key] / 1e6:.0f}" for key in ("read", "written")] if one["refused"] is None else ["", ""]
            passes = f"{one['passes']:.1f}" if one["refused"] is None else "refused"
            error = "" if one.get("error") is None else f"{one['error']:.1e}"
            rows.append([label, one["name"], *figures, passes, error])
    return (
        "Memory traffic of one forward, measured by Nsight Compute; a pass is one read or write of the [tokens, "
        "channels] tensor in bf16:\n\n" + table_of(TRAFFIC_HEADER, rows)
    )


def implementations_table(run: dict) -> str:
    """Return the first module's latency and the others' speed-ups over it, a row per size, dtype and mode."""
    names = list(dict.fromkeys(row["implementation"] for row in run["rows"]))
    groups: dict[str, dict[str, dict]] = {}
    for row in run["rows"]:
        label = f"{row['B']}×{row['N']}×{row['C']}, {row['dtype']}, {row['mode']}"
        groups.setdefault(label, {})[row["implementation"]] = row
    lines = []
    for label, rows in groups.items():
        first = rows[names[0]]
        latency = "refused" if first["latency"] is None else f"{first['latency'] * 1e3:.3f}"
        others = [f"{row['speedup']:.2f}×" if row["speedup"] else row["status"] for row in map(rows.get, names[1:])]
        lines.append([label, latency, *others])
    first, *others = map(module_of, names)
    return (
        f"The attention modules for new models: the median latency of {first}, and the others' speed-up over it. All "
        "are checked against fp64 before they are timed:\n\n"
        + table_of(["samples×tokens×channels", f"{first}, ms", *others], lines)
    )
