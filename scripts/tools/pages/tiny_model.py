"""The share of its captions that the embedded model shows, in every tier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from turbo_rcm_patch.wording import counted

from .cells import decibels, percent, table_of, versions, with_error

TRAINING = "training.json"
# The results of measure_block_sparsity.py, evaluate_sparse.py and train_lora.py, which need no GPU.
BLOCK_SPARSE, SPARSE, LORA = "block-sparse-tiny.json", "sparse-tiny.json", "lora-tiny.json"
SIDE_BY_SIDE = "side-by-side.json"  # from `turbo-rcm compare`; its picture is in the same folder

PLAIN = ("unpatched", "exact", "quantized")  # variants without options
ACCURACY_TARGETS = {2: 0.9, 4: 0.95}  # overall prompt accuracy of the embedded model, by steps


def evaluation_of(runs: dict) -> dict | None:
    """Return a GPU's evaluation, with the sparse tier's rows from another run of the same captions, or None."""
    evaluation, sparse = runs.get("evaluate"), runs.get("evaluate-sparse")
    if evaluation is None or sparse is None:
        return evaluation
    captions, others = ([run["settings"].get(key) for key in ("n", "seed")] for run in (evaluation, sparse))
    rows = [row for row in sparse["results"] if tier_of(row) == "sparse" and captions == others]
    return {**evaluation, "results": sorted([*evaluation["results"], *rows], key=lambda row: row["steps"])}


def tier_of(row: dict) -> str:
    """Return the tier of an evaluation's row. Its variant may also tell what attention keeps: "sparse, topk 0.1"."""
    return row["variant"].partition(",")[0]


def evaluated(file: str, runs: dict, training: dict | None) -> str:
    """Return the prompt accuracy of the embedded model and its teacher, or "" without an evaluation.

    file: the results file's name.
    """
    evaluation = evaluation_of(runs)
    if evaluation is None:
        return ""
    attributes, rows, origin = list(evaluation["results"][0]["accuracy"]), [], ""
    if training is not None:
        taught = training["stages"]["teacher accuracy"]
        rows.append(["teacher, guided", taught["steps"], taught["accuracy"], None, None, None])
        minutes = training["seconds"] / 60
        gpu = training["environment"]["gpu"]
        origin = f"The stages of its training took {minutes:.1f} minutes on one {gpu} (`{TRAINING}`). "
    for result in evaluation["results"]:
        psnr = result["psnr_to_fp32"], result["psnr_to_exact"]
        rows.append([result["variant"], result["steps"], result["accuracy"], result["change"], *psnr])
    header = ["variant", "steps", *attributes, "vs unpatched", "PSNR to fp32, dB", "to exact, dB"]
    lines = []
    for variant, steps, accuracy, change, *psnr in rows:
        shares = [percent(accuracy[name]["share"]) for name in attributes]
        if accuracy["overall"]["share"] < ACCURACY_TARGETS.get(steps, 0):
            shares[-1] += " ✗"
        shares[-1] += f" ± {percent(accuracy['overall']['standard_error'])}"
        changed = "" if change is None else f"{100 * change['share']:+.1f} ± {percent(change['standard_error'])}"
        lines.append([variant, str(steps), *shares, changed, *map(decibels, psnr)])
    environment = evaluation["environment"]
    return (
        f"\nShare of what {evaluation['settings']['n']} held-out captions ask for that the videos show, in %, overall "
        f"with its standard error; ✗: below the target, {_accuracy_targets()}. {environment['gpu']}, torch "
        f"{environment['torch']}. {origin}"
        f"File: `{file}`.\n\n" + table_of(header, lines)
    )


def sparse_table(results: dict) -> str:
    """Return what a kept share of the key blocks costs the embedded model, with and without its fine-tuning."""
    settings, environment, rows = results["settings"], results["environment"], results["results"]
    steps = list(dict.fromkeys(row["steps"] for row in rows))
    header = ["attention", "key blocks kept"]
    for count in steps:
        header += [f"{counted(count, 'step')}, %", "PSNR to exact, dB"]
    lines, dtype = [], _dtype(results)
    for variant, kept in dict.fromkeys((row["variant"], row["kept"]) for row in rows):
        cells = [f"{variant} in {dtype}", "all" if kept is None else f"{100 * kept:.0f} %"]
        for row in (row for row in rows if (row["variant"], row["kept"]) == (variant, kept)):
            cells += [with_error(row["accuracy"]["overall"]), decibels(row["psnr_to_exact"])]
        lines.append(cells)
    queries, keys = settings["blocks"]
    return (
        "## Sparse-linear attention on the tiny model\n\n"
        f"Share of what {settings['n']} held-out captions ask for that the videos show, in %, with its standard error, "
        "and the PSNR of the frames to those of exact attention. The model's videos have 700 tokens: blocks of "
        f"{queries} queries and {keys} keys. Block sparse: softmax attention to the kept blocks, with the dense "
        "model's weights; SLA: the weights that `scripts/training/train_sparse.py` fine-tuned, with the linear branch. "
        f"{environment['gpu'] or 'On a CPU'}, {versions(environment)}. File: `{SPARSE}`.\n\n" + table_of(header, lines)
    )


def tiers_table(evaluation: dict, sparse: dict, block_sparse: dict) -> str:
    """Return the table of the embedded model's accuracy in every tier.

    It has a row for each variant, and tells the device and the number of captions. evaluation: from `evaluation_of`.
    sparse, block_sparse: files of this folder.
    """
    of_sparse = [row for row in sparse["results"] if row["variant"] in ("exact", "SLA")]
    of_block_sparse = [block_sparse["exact"], *block_sparse["variants"]]
    groups = [
        (evaluation, _by_variant(evaluation["results"], lambda row: row["variant"])),
        (sparse, _by_variant(of_sparse, partial(_sparse_name, dtype=_dtype(sparse)))),
        (block_sparse, _by_variant(of_block_sparse, partial(_block_sparse_name, dtype=_dtype(block_sparse)))),
    ]
    return (
        "as the share of what the captions ask for that the videos show, in %, with its standard error. The PSNR "
        "compares the frames with the exact tier's, at the largest number of steps:\n\n"
        + _table_of_groups(groups).rstrip()
    )


def _table_of_groups(groups: list[tuple[dict, dict]]) -> str:
    """Return a table of measurements with {variant: its results by steps}, each over the same captions."""
    counts = sorted({steps for _, variants in groups for rows in variants.values() for steps in rows})
    header = ["measured on", "captions", "variant", *(counted(count, "step") for count in counts), "PSNR to exact, dB"]
    lines = []
    for measured, variants in groups:
        where = [measured["environment"]["gpu"] or "a CPU", str(measured["settings"]["n"])]
        for name, rows in variants.items():
            shares = [with_error(rows[count]["accuracy"]["overall"]) if count in rows else "" for count in counts]
            lines.append([*where, name, *shares, decibels(rows[max(rows)]["psnr_to_exact"])])
            where = ["", ""]
    return table_of(header, lines)


def _dtype(measured: dict) -> str:
    """Return the dtype of the model in the sparse rows' measurements: from the file, else by the device."""
    on_device = "float32" if measured["environment"]["gpu"] is None else "bfloat16"
    return {"float32": "fp32", "bfloat16": "bf16"}[measured["settings"].get("dtype", on_device)]


def _sparse_name(row: dict, dtype: str) -> str:
    if row["kept"] is None:
        return row["variant"]
    return f"sparse (SLA) in {dtype}, {100 * row['kept']:.0f} % of the key blocks"


def _block_sparse_name(row: dict, dtype: str) -> str:
    return row["variant"] if row["variant"] == "exact" else f"block_sparse in {dtype}, {row['variant']}"


def _by_variant(results: list[dict], name_of: Callable[[dict], str]) -> dict[str, dict[int, dict]]:
    """Return the results by name and number of steps."""
    variants: dict[str, dict[int, dict]] = {}
    for row in results:
        variants.setdefault(name_of(row), {})[row["steps"]] = row
    return variants


def lora_table(results: dict) -> str:
    """Return what the judge sees of a LoRA for the embedded model, patched and unpatched."""
    settings, environment, training = results["settings"], results["environment"], results["training"]
    colour = settings["colour"]
    rows = [
        [row["variant"], percent(row["colour"]), percent(row["asked"]), decibels(row["psnr"])]
        for row in results["results"]
    ]
    return (
        "## A LoRA on the tiny model\n\n"
        f"`scripts/training/train_lora.py` trains a LoRA of rank {settings['rank']} that paints every shape {colour}: "
        f"{training['updates']} updates in {training['seconds']:.0f} s. {settings['n']} held-out captions ask for "
        f"other colours. The table has the share of their shapes that the judge sees in {colour}, and in the colour "
        f"asked for. The PSNR compares the frames with the unpatched ones with the LoRA. {settings['steps']} steps, "
        f"{environment['gpu'] or 'on a CPU'}, {versions(environment)}. File: `{LORA}`.\n\n"
        + table_of(["the LoRA", f"{colour}, %", "as asked, %", "PSNR, dB"], rows)
    )


def side_by_side(run: dict) -> str:
    """Return one video unpatched and patched, as a picture, and how far the two are apart."""
    settings, environment = run["settings"], run["environment"]
    patched = run["variants"][-1]
    picture = SIDE_BY_SIDE.replace(".json", ".png")
    return (
        f"## One video, side by side\n\n![A video unpatched, patched, and the difference]({picture})\n\n"
        f"Three frames, unpatched, patched, and their difference, amplified {run['difference_gain']} times: "
        f'`turbo-rcm compare "{settings["prompt"]}" '
        f"--dtype {settings['dtype']} --seed {settings['seed']} --video {picture} --json {SIDE_BY_SIDE}`, "
        f"{settings['num_inference_steps']} steps, {environment['gpu'] or 'on a CPU'}, {versions(environment)}. "
        f"Transformer and decoder are patched. The frames' PSNR is {decibels(patched['frames']['psnr_db'])} dB.\n"
    )


def _accuracy_targets() -> str:
    return ", ".join(f"{100 * share:.0f} in {steps} steps" for steps, share in ACCURACY_TARGETS.items())
