"""How much of its captions the embedded model shows, in every tier."""

from __future__ import annotations

from .cells import decibels, percent, table_of, versions

TRAINING = "training.json"
SPARSE = "sparse-tiny.json"  # of scripts/evaluate_sparse.py, which needs none either
LORA = "lora-tiny.json"  # of scripts/train_lora.py, nor does that

ACCURACY_TARGETS = {2: 0.9, 4: 0.95}  # overall prompt accuracy of the embedded model, by steps


def evaluated(file: str, runs: dict, training: dict | None) -> str:
    """Prompt accuracy of the embedded model and of its teacher; empty for a GPU without an evaluation.

    file: the results file's name.
    """
    evaluation = runs.get("evaluate")
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
            shares[-1] = f"**{shares[-1]}**"
        shares[-1] += f" ± {percent(accuracy['overall']['standard_error'])}"
        changed = "" if change is None else f"{100 * change['share']:+.1f} ± {percent(change['standard_error'])}"
        lines.append([variant, str(steps), *shares, changed, *map(decibels, psnr)])
    environment = evaluation["environment"]
    return (
        f"\nShare of what {evaluation['settings']['n']} held-out captions ask for that the videos show, in %, overall "
        f"with its standard error; bold: below the target, {_accuracy_targets()}. {environment['gpu']}, torch "
        f"{environment['torch']}. {origin}"
        f"File: `{file}`.\n\n" + table_of(header, lines)
    )


def sparse_table(results: dict) -> str:
    """What a kept share of the key blocks costs the embedded model, with and without its fine-tuning."""
    settings, environment, rows = results["settings"], results["environment"], results["results"]
    steps = list(dict.fromkeys(row["steps"] for row in rows))
    header = ["attention", "key blocks kept"]
    for count in steps:
        header += [f"{count} step{'s' * (count > 1)}, %", "PSNR to exact, dB"]
    lines = []
    for variant, kept in dict.fromkeys((row["variant"], row["kept"]) for row in rows):
        cells = [variant, "all" if kept is None else f"{100 * kept:.0f} %"]
        for row in (row for row in rows if (row["variant"], row["kept"]) == (variant, kept)):
            overall = row["accuracy"]["overall"]
            cells += [f"{percent(overall['share'])} ± {percent(overall['standard_error'])}"]
            cells.append(decibels(row["psnr_to_exact"]))
        lines.append(cells)
    queries, keys = settings["blocks"]
    return (
        "## Sparse-linear attention on the tiny model\n\n"
        f"Share of what {settings['n']} held-out captions ask for that the videos show, in %, with its standard error, "
        "and the PSNR of the frames to those of exact attention. The model's videos have 700 tokens: blocks of "
        f"{queries} queries and {keys} keys. Block sparse: softmax attention to the kept blocks, with the dense "
        "model's weights; SLA: the weights that `scripts/train_sparse.py` fine-tuned, with the linear branch. "
        f"{environment['gpu'] or 'On a CPU'}, {versions(environment)}. File: `{SPARSE}`.\n\n" + table_of(header, lines)
    )


def lora_table(results: dict) -> str:
    """What the judge sees of a LoRA for the embedded model, patched and unpatched."""
    settings, environment, training = results["settings"], results["environment"], results["training"]
    colour = settings["colour"]
    rows = [
        [row["variant"], percent(row["colour"]), percent(row["asked"]), decibels(row["psnr"])]
        for row in results["results"]
    ]
    return (
        "## A LoRA on the tiny model\n\n"
        f"`scripts/train_lora.py` trains a LoRA of rank {settings['rank']} that paints every shape {colour}: "
        f"{training['updates']} updates in {training['seconds']:.0f} s. Of the shapes of {settings['n']} held-out "
        f"captions that ask for another colour, the judge sees so many % in {colour}, and in the colour that was asked "
        f"for; the PSNR is that of the frames to the unpatched ones with the LoRA. {settings['steps']} steps, "
        f"{environment['gpu'] or 'on a CPU'}, {versions(environment)}. File: `{LORA}`.\n\n"
        + table_of(["the LoRA", f"{colour}, %", "as asked, %", "PSNR, dB"], rows)
    )


def _accuracy_targets() -> str:
    return ", ".join(f"{100 * share:.0f} in {steps} steps" for steps, share in ACCURACY_TARGETS.items())
