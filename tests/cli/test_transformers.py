"""--transformer and --transformer-2: which folders and files take the place of a pipeline's transformers."""

import pytest
from safetensors.torch import save_file

from tests.cli.running import TINY, error_of
from tests.official_names import official_state_dict, with_scales
from tests.tiny_ltx2 import tiny_ltx2_pipeline_for_prompts
from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.cli import main


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Pipelines of Wan 2.1 and 2.2 and LTX-2, without weights, and folders of transformers alone."""
    root = tmp_path_factory.mktemp("models")
    tiny_wan_pipeline("t2v").save_pretrained(root / "t2v")
    tiny_wan_pipeline("wan22").save_pretrained(root / "wan22")
    tiny_ltx2_pipeline_for_prompts().save_pretrained(root / "ltx2")
    tiny_wan_transformer(in_channels=36).save_pretrained(root / "from_image")
    tiny_wan_transformer(text_dim=48).save_pretrained(root / "wide")
    tiny_wan_transformer(layers=1).save_pretrained(root / "small")
    return root


@pytest.mark.parametrize(
    ("model", "folder", "message"),
    [
        ("t2v", "from_image", "does not fit the transformer of --model {}: in_channels is 36, not 16. Give one made"),
        ("t2v", "wide", "does not fit the transformer of --model {}: text_dim is 48, not 32. Give one made"),
        ("wan22", "wide", "does not fit the transformer of --model {}: text_dim is 48, not 32. Give one made"),
        ("t2v", "ltx2/transformer", "LTX2VideoTransformer3DModel, but the transformer of --model {} is a WanTrans"),
        ("ltx2", "t2v/transformer", "WanTransformer3DModel, but the transformer of --model {} is a LTX2Video"),
    ],
)
def test_a_folder_of_another_model_is_refused(models, tmp_path, capsys, model, folder, message):
    options = ["--model", models / model, "--transformer", models / folder, *TINY]
    line = error_of(capsys, "generate", "a fox", "-o", tmp_path / "out.mp4", *options)
    assert f"--transformer: {models / folder} " in line
    assert message.format(models / model) in line


def test_a_folder_in_8_bits_of_another_model_is_refused(models, tmp_path, capsys):
    assert main(["convert", str(models / "from_image"), str(tmp_path / "out"), "--device", "cpu"]) == 0
    options = ["--model", models / "t2v", "--transformer", tmp_path / "out", "--preset", "quantized", *TINY]
    line = error_of(capsys, "generate", "a fox", "-o", tmp_path / "out.mp4", *options)
    assert "in_channels is 36, not 16" in line


def test_a_pipeline_s_own_transformer_may_be_missing_or_of_another_depth(models, tmp_path):
    """Then nothing is known of what fits."""
    for part in (models / "t2v").iterdir():
        if part.name != "transformer":
            (tmp_path / part.name).symlink_to(part)
    for model in (models / "t2v", tmp_path):
        options = ["--model", model, "--transformer", models / "small", *TINY]
        assert main(list(map(str, ["generate", "a fox", "-o", tmp_path / "out.mp4", *options]))) == 0


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_files_of_experts_that_are_swapped_are_warned_about(models, tmp_path, capsys, stop_at, in_8_bits):
    weights = official_state_dict(tiny_wan_transformer())
    high, low = (tmp_path / f"wan2.2_t2v_{expert}_noise.safetensors" for expert in ("high", "low"))
    for path in (high, low):
        save_file(with_scales(weights) if in_8_bits else weights, path)
    stop_at("timed_generation")

    def printed(model, *paths):
        given = [part for each in zip(("--transformer", "--transformer-2"), paths, strict=False) for part in each]
        options = ["--model", models / model, *given, *TINY, "--preset", "quantized"]
        main(list(map(str, ["generate", "a fox", "-o", tmp_path / "out.mp4", *options])))
        return capsys.readouterr().err

    told = (
        "warning: {} is taken for the {}-noise expert: the order is (high, low), as --transformer and --transformer-2."
    )
    swapped = printed("wan22", low, high)
    assert told.format(low.name, "high") in swapped
    assert told.format(high.name, "low") in swapped
    assert "is taken for" not in printed("wan22", high, low)
    assert "is taken for" not in printed("t2v", low)


def test_experts_that_were_converted_one_by_one_are_loaded_by_their_folder(models, tmp_path, capsys):
    halves = [tmp_path / "in 8 bits" / name for name in ("transformer", "transformer_2")]
    halves[0].parent.mkdir()
    for half in halves:
        source = models / "wan22" / half.name
        assert main(["convert", str(source), str(half), "--dtype", "float32", "--device", "cpu"]) == 0
    told = capsys.readouterr().out.split("use it by\n")[-1]
    assert f"--transformer '{halves[0].parent}' --preset quantized\n" in told
    assert f"trp.load_converted('{halves[0].parent}', pipe, 'quantized')" in told
    command = ["generate", "a fox", "-o", tmp_path / "out.mp4", "--model", models / "wan22", *TINY]
    command += ["--preset", "quantized"]
    second = ["--transformer-2", halves[1]]
    for given in (["--transformer", halves[0], *second], second):
        line = error_of(capsys, *command, *given)
        assert f"{given[0]} {given[1]} holds 8-bit weights; give the folder that holds both, as transformer and" in line
        assert f"--transformer {halves[0].parent}, without --transformer-2." in line
    assert main(list(map(str, [*command, "--transformer", halves[0].parent]))) == 0
