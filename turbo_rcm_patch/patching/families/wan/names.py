"""The names that Wan's authors give to its modules and parameters, for all models that copy its blocks."""

from __future__ import annotations

import re

from ....checkpoints.names import OTHERS, Names

WAN_NAMES = Names(
    "Wan",
    "blocks",
    (
        (r"\.attn1\.", ".self_attn."),
        (r"\.attn2\.", ".cross_attn."),
        (r"\.to_([qkv])$", r".\1"),
        (r"\.to_out\.0$", ".o"),
        (r"\.add_([kv])_proj$", r".\1_img"),
        (r"\.norm_added_([kq])$", r".norm_\1_img"),
        (r"\.ffn\.net\.0\.proj$", ".ffn.0"),
        (r"\.ffn\.net\.2$", ".ffn.2"),
        (r"^((?:vace_)?blocks\.\d+)\.norm2$", r"\1.norm3"),  # the norm of the two that has a weight
        (r"^((?:vace_)?blocks\.\d+)\.scale_shift_table$", r"\1.modulation"),
        (r"^(vace_blocks\.\d+)\.proj_in$", r"\1.before_proj"),
        (r"^(vace_blocks\.\d+)\.proj_out$", r"\1.after_proj"),
        (r"^scale_shift_table$", "head.modulation"),
        (r"^proj_out$", "head.head"),
        (r"^condition_embedder\.text_embedder\.linear_1$", "text_embedding.0"),
        (r"^condition_embedder\.text_embedder\.linear_2$", "text_embedding.2"),
        (r"^condition_embedder\.time_embedder\.linear_1$", "time_embedding.0"),
        (r"^condition_embedder\.time_embedder\.linear_2$", "time_embedding.2"),
        (r"^condition_embedder\.time_proj$", "time_projection.1"),
        (r"^condition_embedder\.image_embedder\.norm1$", "img_emb.proj.0"),
        (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj$", "img_emb.proj.1"),
        (r"^condition_embedder\.image_embedder\.ff\.net\.2$", "img_emb.proj.3"),
        (r"^condition_embedder\.image_embedder\.norm2$", "img_emb.proj.4"),
        (r"^condition_embedder\.image_embedder\.pos_embed$", "img_emb.emb_pos"),
    ),
    ("attn1", "self_attn"),
    of_image=re.compile(r"(^|[._])(img_emb|image_embedder|k_img|v_img|add_[kv]_proj|norm_added_[kq])([._]|$)"),
    ignored=re.compile(OTHERS),
)
