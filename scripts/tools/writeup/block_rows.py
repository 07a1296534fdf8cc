"""The parts of a Wan block and of a step in every tier, each the sum of rows of single ops.

All tiers' rows are from the same runs of a results file.
"""

from __future__ import annotations

from typing import NamedTuple

from scripts.tools.pages.charts import milliseconds, real_models, title_of
from turbo_rcm_patch.bench.ops_quantized import SCALED_MM
from turbo_rcm_patch.bench.variants import EXACT_PATCH
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.tables import table
from turbo_rcm_patch.tiers import TIERS

SELF_ATTENTION, CROSS_ATTENTION = "self-attention with its norms and RoPE", "cross-attention"
LINEARS, NORMS = "linears with GELU and skips", "norms with modulation"
ATTENTION = (SELF_ATTENTION, CROSS_ATTENTION)
ALL_ELSE = "all else of the step"
COMPILE = "torch.compile"
RIVALS = "torch + compiled", "SDPA cuDNN"  # what a compiled block runs; whichever of them a row has
OURS = ("ours",)
HEAD_DIM, TEXT_TOKENS = 128, 512


class Rows(NamedTuple):
    """A row of a run, counted several times. case: the row's name in the run, with op and sizes."""

    count: int
    run: str
    case: str

    def __str__(self) -> str:
        return f"`{self.case}`" if self.count == 1 else f"{self.count} × `{self.case}`"


def rows_of_block(config: str, tokens: int, dim: int) -> dict[str, dict[str, tuple[Rows, ...]]]:
    """Return the rows that make up a block, by tier and part.

    Three parts of the cross-attention have no row, and a step has them in ALL_ELSE: the projection of the queries, the
    QK-norms, and the text's keys and values.
    """
    heads, ffn_dim = dim // HEAD_DIM, CASES[config].transformer["ffn_dim"]
    square, up, down = (f"{tokens}×{C}×{K}" for C, K in ((dim, dim), (ffn_dim, dim), (dim, ffn_dim)))
    of_heads = f"{heads}×{tokens}×{HEAD_DIM}"

    def bf16(count: int, case: str) -> Rows:
        return Rows(count, "ops", case)

    def in_8_bits(fed: int) -> tuple[Rows, ...]:
        """Return the rows of linears in 8 bits. fed: how many output projections the attention feeds in 8 bits."""
        cases = (
            (1, f"linear_qkv_8bit {square}"),
            (fed, f"fed_linear_skip_8bit {square}"),
            (2 - fed, f"linear_skip_8bit {square}"),
            (1, f"linear_gelu_8bit {up}"),
            (1, f"fed_linear_skip_8bit {down}"),
        )
        return tuple(Rows(count, "ops-quantized", case) for count, case in cases if count)

    exact = {
        SELF_ATTENTION: (
            bf16(1, f"attention {heads}×{tokens}×{tokens}×{HEAD_DIM}"),
            bf16(2, f"rms_norm_rope {tokens}×{heads}×{HEAD_DIM}"),
        ),
        CROSS_ATTENTION: (bf16(1, f"attention {heads}×{tokens}×{TEXT_TOKENS}×{HEAD_DIM}"),),
        LINEARS: (
            bf16(1, f"linear_qkv {square}"),
            bf16(2, f"linear_skip {square}"),
            bf16(1, f"linear_gelu {up}"),
            bf16(1, f"linear_skip {down}"),
        ),
        NORMS: (bf16(3, f"layer_norm_modulate {tokens}×{dim}"),),
    }
    dense = (Rows(1, "ops-quantized", f"norms_attention_8bit {of_heads}"),)
    sparse = (Rows(1, "ops-sparse", f"norms_sparse_linear_attention {of_heads}"),)
    return {
        COMPILE: exact,
        "exact": exact,
        "quantized": {**exact, SELF_ATTENTION: dense, LINEARS: in_8_bits(fed=2)},
        "sparse": {**exact, SELF_ATTENTION: sparse, LINEARS: in_8_bits(fed=1)},
    }


def blocks_by_tier(runs: dict) -> dict[str, dict[str, dict[str, float]]]:
    """Return the milliseconds of one block by model, tier and part, for models with a profiled block."""
    return {
        config: {
            tier: {part: _sum(runs, rows, RIVALS if tier == COMPILE else OURS) for part, rows in parts.items()}
            for tier, parts in rows_of_block(config, settings["tokens"], settings["dim"]).items()
        }
        for config, settings in _profiled(runs).items()
    }


def steps_by_tier(runs: dict) -> dict[str, dict[str, dict[str, float]]]:
    """Return the milliseconds of a measured step by model, tier and part: of all its blocks, and ALL_ELSE.

    ALL_ELSE is negative if the rows, which are timed alone, add up to more than the step.
    """
    profiled, blocks, steps = _profiled(runs), blocks_by_tier(runs), {}
    for run in real_models(runs).values():
        if run["settings"].get("preset") == "block_sparse":
            continue  # whose attention has no row: its time depends on the input
        settings, shown = run["settings"], steps.setdefault(title_of(run), {})
        if settings.get("ulysses", 1) > 1 or _size(settings) != _size(profiled.get(settings["config"], {})):
            continue
        tier = settings.get("preset", "exact")
        of_variant = {"patched": tier, EXACT_PATCH: "exact", COMPILE: COMPILE}
        for variant in run["variants"]:
            if variant["name"] in of_variant:
                name = of_variant[variant["name"]]
                parts = {part: settings["layers"] * time for part, time in blocks[settings["config"]][name].items()}
                rest = {ALL_ELSE: milliseconds(variant) - sum(parts.values())}
                shown.setdefault(name, parts | rest)
    order = (COMPILE, *TIERS)
    return {model: {name: shown[name] for name in order if name in shown} for model, shown in steps.items() if shown}


def _size(settings: dict) -> tuple:
    """Return the size of a video from the settings of either kind of run."""
    return settings.get("height"), settings.get("width"), settings.get("num_frames", settings.get("frames"))


def _profiled(runs: dict) -> dict[str, dict]:
    """Return the settings of the runs that profiled a block, by model."""
    settings = (run.get("settings", {}) for run in runs.values())
    return {found["config"]: found for found in settings if found.get("case") == "Wan block"}


def _sum(runs: dict, rows: tuple[Rows, ...], contenders: tuple[str, ...]) -> float:
    return sum(row.count * _milliseconds(runs, row, contenders) for row in rows)


def _milliseconds(runs: dict, row: Rows, contenders: tuple[str, ...]) -> float:
    """Return the time of the first contender that the row has; for OURS, of the best of ours."""
    result = next(result for result in runs[row.run]["results"] if result["case"] == row.case)
    names = (result["best"],) if contenders == OURS else contenders
    return next(result["timings"][name]["milliseconds"] for name in names if name in result["timings"])


def shares_table(blocks: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a table of the attention's share of a block, a row for each model."""
    lines = [["block of", *next(iter(blocks.values()))]]
    for config, block in blocks.items():
        lines.append([config, *(f"{100 * attention_share(parts):.0f} %" for parts in block.values())])
    return table(lines, markdown=True)


def saved_outside_attention(runs: dict, config: str) -> dict[str, float]:
    """Return the time that our linears and norms save outside attention.

    "saved": the milliseconds that the exact tier saves over torch.compile, also as a share of a compiled block.
    "saved_in_8_bits": the milliseconds that the sparse tier saves over PyTorch's 8-bit products with compiled
    quantising and compiled norms, as a share of a sparse block with those.
    """
    block, settings = blocks_by_tier(runs)[config], _profiled(runs)[config]
    rows = rows_of_block(config, settings["tokens"], settings["dim"])
    rivals = _sum(runs, rows["sparse"][LINEARS], (SCALED_MM,))
    saved = outside_attention(block[COMPILE]) - outside_attention(block["exact"])
    in_8_bits = rivals + block[COMPILE][NORMS] - outside_attention(block["sparse"])
    compiled, sparse = (sum(block[tier].values()) for tier in (COMPILE, "sparse"))
    shares = {"of_compiled": saved / compiled, "of_sparse": in_8_bits / (sparse + in_8_bits)}
    return {"saved": saved, "saved_in_8_bits": in_8_bits, **shares}


def attention_share(parts: dict[str, float]) -> float:
    return sum(parts[part] for part in ATTENTION) / sum(parts.values())


def outside_attention(parts: dict[str, float]) -> float:
    """Return the milliseconds of all parts except attention."""
    return sum(time for part, time in parts.items() if part not in ATTENTION)


def rows_table(runs: dict, config: str) -> str:
    """Return the rows whose sum is each part of a model's bars."""
    settings, tiers = _profiled(runs)[config], blocks_by_tier(runs)[config]
    lines = [["part", "tier", "ms", "rows"]]
    rows = rows_of_block(config, settings["tokens"], settings["dim"])
    for part in (*ATTENTION, LINEARS, NORMS):
        for tier, parts in tiers.items():
            names = ", ".join(map(str, rows[tier][part]))
            lines.append([part if tier == next(iter(tiers)) else "", tier, f"{parts[part]:.2f}", names])
    return table(lines, markdown=True)
