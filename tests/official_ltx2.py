"""LTX-2 transformers' weights in their authors' names, written out here independently of the package."""

# The authors' names and diffusers', without those that are equal, such as transformer_blocks.0.attn1.to_q.
OUTSIDE = {
    "patchify_proj": "proj_in",
    "audio_patchify_proj": "audio_proj_in",
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
}
LTX2_3 = {"prompt_adaln_single": "prompt_adaln", "audio_prompt_adaln_single": "audio_prompt_adaln"}
TABLES = {
    "scale_shift_table_a2v_ca_video": "video_a2v_cross_attn_scale_shift_table",
    "scale_shift_table_a2v_ca_audio": "audio_a2v_cross_attn_scale_shift_table",
}
NORMS = {"q_norm": "norm_q", "k_norm": "norm_k"}


def official_ltx2(name):
    """The authors' name of a parameter."""
    first, *rest = name.split(".")
    theirs = {ours: theirs for theirs, ours in {**OUTSIDE, **LTX2_3, **TABLES, **NORMS}.items()}
    return ".".join([theirs.get(first, first), *(theirs.get(part, part) for part in rest)])


def ltx2_state_dict(model, *, prefix=""):
    """The parameters of an LTX-2 transformer under the authors' names."""
    return {f"{prefix}{official_ltx2(name)}": tensor.clone() for name, tensor in model.state_dict().items()}
