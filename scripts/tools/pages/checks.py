"""What `turbo-rcm verify` found: of blocks, of their parts, of the decoding, and what block-sparse attention keeps."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.benchmarks.attention_error import LEAST_COSINE, MOST_BESIDE_RIVAL, MOST_L1, NORMAL
from scripts.tools.pages.charts import model_of
from turbo_rcm_patch.bench.cases import CASES
from turbo_rcm_patch.bench.ops_quantized import ATTENTION_ERROR

from .cells import bold, percent, table_of

VERIFIED_HEADER = (
    "run",
    "preset",
    "checks",
    "failed",
    "unpatched, mean error",
    "patched, mean error",
    "patched, largest",
)


def verified_table(runs: dict) -> str:
    """A row for the blocks of every run of verify, and one for its decoding."""
    return (
        "Patched blocks at the first and the last step, and the decoding, on the inputs of a generation: relative L2 "
        "errors to an fp32 oracle:\n\n"
        + table_of(VERIFIED_HEADER, [row for name, run in runs.items() for row in _verified_rows(name, run)])
    )


def _verified_rows(name: str, run: dict) -> Iterator[list[str]]:
    checks = {"blocks": run["checks"], "decoding": [run["decoding"]] if run.get("decoding") else []}
    label, preset = f"{_checked_model(run)}, `{name}`", run["settings"]["preset"]
    for what, found in checks.items():
        if found:
            unreached = run["unreached"] if what == "blocks" else []
            failed = len(unreached) + sum(not check["ok"] for check in found)
            unpatched, patched = ([check[f"{kind}_error"] for check in found] for kind in ("unpatched", "patched"))
            means = (f"{sum(errors) / len(errors):.1e}" for errors in (unpatched, patched))
            counts = f"{len(found)} of {what}", bold(str(failed), failed > 0)
            yield [label, preset, *counts, *means, f"{max(patched):.1e}"]
            label = preset = ""


def _checked_model(run: dict) -> str:
    """The model and the video of a run, and how many of the model's layers it has."""
    name, case = model_of(run), CASES.get(run["settings"].get("config"))
    return name if case is None else name.replace(" layers)", f" of {case.transformer['num_layers']} layers)")


def kept_table(name: str, run: dict) -> str:
    """What every layer of a block-sparse model keeps, a column per checked step."""
    shares = {(one["block"], one["step"]): one["share"] for one in run["kept"]}
    blocks, steps = (list(dict.fromkeys(key[i] for key in shares)) for i in (0, 1))
    rows = [[f"`{block}`", *(percent(shares.get((block, step))) for step in steps)] for block in blocks]
    return (
        f"The pairs of blocks of queries and keys that the layers of {_checked_model(run)} keep, in % (`{name}`; 100 "
        "where attention is dense):\n\n" + table_of(["layer", *(f"step {step}" for step in steps)], rows)
    )


def parts_table(run: dict) -> str:
    """What the parts of blocks err in a tier that errs more, over all blocks and checked steps."""
    settings, rows = run["settings"], []
    for name in dict.fromkeys(part["part"] for part in run["parts"]):
        parts = [part for part in run["parts"] if part["part"] == name]
        errors = [part["error"] for part in parts]
        mean, largest = f"{sum(errors) / len(errors):.1e}", f"{max(errors):.1e}"
        failed = not all(part["ok"] for part in parts)
        allowed = parts[0]["allowed"]
        rows.append([name, mean, f"**{largest}**" if failed else largest, "" if allowed is None else f"{allowed:.1e}"])
    model = settings.get("config") or settings.get("model")
    return (
        f"Parts of the blocks of {model}, preset {settings['preset']}, each on the inputs that an fp32 oracle's has: "
        "relative L2 errors to the oracle (of a sub-layer: of what it adds):\n\n"
        + table_of(("part", "mean error", "largest error", "allowed"), rows)
    )


ATTENTION_ERRORS_HEADER = (
    "values",
    "attentions",
    "cosine",
    "relative L1",
    "relative L2",
    "FA3 fp8, simulated: relative L2",
    "ours as a share of it",
    "allowed",
)
LIKE_A_MODELS = f"cosine ≥ {LEAST_COSINE}, L1 ≤ {MOST_L1}, share ≤ {MOST_BESIDE_RIVAL}"


def attention_errors_table(run: dict) -> str:
    """A row for each kind of values, of the worst of its attentions."""
    sizes = "{tokens} tokens, {heads} heads of {head_dim} channels".format(**run["settings"])
    return (
        f"Attention in 8 bits, the kernel alone, beside fp64: of drawn values ({sizes}) and of what the embedded model "
        "attends to in a generation. FlashAttention-3's roundings, with unit scales, are simulated:\n\n"
        + table_of(ATTENTION_ERRORS_HEADER, map(_attention_error_row, run["attention_errors"]))
    )


def _attention_error_row(error: dict) -> list[str]:
    figures = {"cosine": ".5f", "relative_l1": ".1e", "relative_l2": ".1e", "rival_l2": ".1e", "beside_rival": ".2f"}
    cells = [bold(format(error[name], form), name in error["missed"]) for name, form in figures.items()]
    allowed = f"L2 ≤ {ATTENTION_ERROR:.1e}" if error["values"] == NORMAL else LIKE_A_MODELS
    return [error["values"], str(error["count"]), *cells, allowed]
