"""Results of `turbo-rcm verify`: errors of blocks, parts and the decoding; shares that block-sparse attention keeps."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.benchmarks.attention_error import LEAST_COSINE, MOST_BESIDE_RIVAL, MOST_L1, NORMAL
from scripts.tools.pages.charts import model_of
from turbo_rcm_patch.bench.ops_quantized import ATTENTION_ERROR
from turbo_rcm_patch.patching.families import CASES

from .cells import marked, percent, table_of

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
    """Return a row for the blocks of every run of verify, and one for each of the VAE's methods."""
    return (
        "Relative L2 errors to an fp32 oracle, on the inputs of a generation: patched blocks at the first and the last "
        "step, and the VAE:\n\n"
        + table_of(VERIFIED_HEADER, [row for name, run in runs.items() for row in _verified_rows(name, run)])
    )


def _verified_rows(name: str, run: dict) -> Iterator[list[str]]:
    label, preset = f"{_checked_model(run)}, `{name}`", run["settings"]["preset"]
    blocks = run["blocks"]
    if blocks:
        failed = blocks["failed"] + len(run["unreached"])
        unpatched, patched = blocks["unpatched_error"], blocks["patched_error"]
        figures = (f"{error:.1e}" for error in (unpatched["mean"], patched["mean"], patched["largest"]))
        yield [label, preset, f"{blocks['count']} of blocks", marked(str(failed), failed > 0), *figures]
        label = preset = ""
    for method in filter(run.get, ("encoding", "decoding")):
        check = run[method]
        figures = (f"{check[kind]:.1e}" for kind in ("unpatched_error", "patched_error", "patched_error"))
        failed = int(not check["ok"])
        yield [label, preset, f"1 of {method}", marked(str(failed), failed > 0), *figures]
        label = preset = ""


def _checked_model(run: dict) -> str:
    """Return the model and the video of a run, and how many of the model's layers it has."""
    name, case = model_of(run), CASES.get(run["settings"].get("config"))
    return name if case is None else name.replace(" layers)", f" of {case.transformer['num_layers']} layers)")


def kept_table(name: str, run: dict) -> str:
    """Return the shares that every layer of a block-sparse model keeps, a column per checked step."""
    steps = list(dict.fromkeys(step for shares in run["kept"].values() for step in shares))
    rows = [[f"`{block}`", *(percent(shares.get(step)) for step in steps)] for block, shares in run["kept"].items()]
    return (
        f"The pairs of blocks of queries and keys that the layers of {_checked_model(run)} keep, in % (`{name}`; 100 "
        "where attention is dense):\n\n" + table_of(["layer", *(f"step {step}" for step in steps)], rows)
    )


def parts_table(run: dict) -> str:
    """Return the errors of the parts of blocks, over all blocks and checked steps."""
    settings, rows = run["settings"], []
    for part in run["parts"]:
        mean, largest = (f"{part['error'][which]:.1e}" for which in ("mean", "largest"))
        allowed = "" if part["allowed"] is None else f"{part['allowed']:.1e}"
        rows.append([part["part"], mean, marked(largest, part["failed"] > 0), allowed])
    model = settings.get("config") or settings.get("model")
    return (
        f"Relative L2 errors of the parts of blocks of {model}, preset {settings['preset']}, to an fp32 oracle. Each "
        "part has the inputs of the oracle's part. For a sub-layer it is the error of the term that it adds:\n\n"
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
    """Return a row for each kind of values, of the worst of its attentions."""
    sizes = "{tokens} tokens, {heads} heads of {head_dim} channels".format(**run["settings"])
    return (
        f"Errors of the kernel of 8-bit attention alone, against fp64: with random values ({sizes}), and with the "
        "values of the embedded model in a generation. FlashAttention-3's roundings are simulated with unit scales:\n\n"
        + table_of(ATTENTION_ERRORS_HEADER, map(_attention_error_row, run["attention_errors"]))
    )


def _attention_error_row(error: dict) -> list[str]:
    figures = {"cosine": ".5f", "relative_l1": ".1e", "relative_l2": ".1e", "rival_l2": ".1e", "beside_rival": ".2f"}
    cells = [marked(format(error[name], form), name in error["missed"]) for name, form in figures.items()]
    allowed = f"L2 ≤ {ATTENTION_ERROR:.1e}" if error["values"] == NORMAL else LIKE_A_MODELS
    return [error["values"], str(error["count"]), *cells, allowed]
