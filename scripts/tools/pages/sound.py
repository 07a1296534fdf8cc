"""The table of what the sound costs in a step of LTX-2."""

from __future__ import annotations

from scripts.tools.pages.charts import model_of

from .cells import marked, table_of

MOST = 0.1  # the largest share of a step at 768×512, 121 frames
HEADER = ("preset", "CUDA graphs", "step, ms", "the video's work alone, ms", "share of the sound, %")


def sound_table(run: dict) -> str:
    """Return a row for each tier with CUDA graphs and without. The faster of both is held to MOST."""
    rows = []
    fastest = {}
    for row in run["sound"]:
        fastest[row["preset"]] = min(row["step"], fastest.get(row["preset"], row["step"]))
    for row in run["sound"]:
        share = 1 - row["video_alone"] / row["step"]
        missed = share > MOST and row["step"] == fastest[row["preset"]]
        times = [f"{row[name]:.1f}" for name in ("step", "video_alone")]
        rows.append([row["preset"], row["cuda_graph"], *times, marked(f"{100 * share:.1f}", missed)])
    return (
        f"The sound of {model_of(run)}: its own sub-layers and its attention to the video, as a share of a patched "
        f"step. It may take {100 * MOST:g} % of the faster step at most:\n\n" + table_of(HEADER, rows)
    )
