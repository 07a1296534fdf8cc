"""The names that LTX-2's authors give to its modules and parameters. TurboT2AV has them too."""

from __future__ import annotations

import re

from ....checkpoints.names import OTHERS, Names

LTX2_NAMES = Names(
    "LTX-2",
    "transformer_blocks",
    (
        (r"^(audio_)?proj_in$", r"\1patchify_proj"),
        (r"^(audio_)?time_embed(?=\.|$)", r"\1adaln_single"),
        (r"^(audio_)?prompt_adaln(?=\.|$)", r"\1prompt_adaln_single"),
        (r"^av_cross_attn_(video|audio)_scale_shift(?=\.|$)", r"av_ca_\1_scale_shift_adaln_single"),
        (r"^av_cross_attn_video_a2v_gate(?=\.|$)", "av_ca_a2v_gate_adaln_single"),
        (r"^av_cross_attn_audio_v2a_gate(?=\.|$)", "av_ca_v2a_gate_adaln_single"),
        (r"\.(video|audio)_a2v_cross_attn_scale_shift_table$", r".scale_shift_table_a2v_ca_\1"),
        (r"\.norm_([qk])$", r".\1_norm"),
    ),
    ("attn1",),
    ignored=re.compile(rf"(video|audio)_embeddings_connector\.|{OTHERS}"),  # connectors are in a pipeline by themselves
)
