"""The commands with --preset sparse: on the embedded model, and on a folder whose files carry proj_l."""

import json

import pytest
import torch

from tests.cli.running import CAPTION, TINY, error_of
from tests.official_names import official_state_dict, with_proj_l
from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.cli import commands, main

SMALL = ["--height", "48", "--width", "48", "--frames", "5", "--device", "cpu"]  # 18 tokens: blocks of 16 and 2
SPARSE = ["--preset", "sparse", "--topk", "0.7"]


@pytest.fixture(scope="module")
def with_projections(tmp_path_factory):
    pipe = tiny_wan_pipeline()
    torch.manual_seed(4)
    for block in pipe.transformer.blocks:
        block.attn1.proj_l = torch.nn.Linear(*2 * (pipe.transformer.config.attention_head_dim,))
    folder = tmp_path_factory.mktemp("turbowan")
    pipe.save_pretrained(folder)
    return folder


def test_generate_says_where_the_published_rule_keeps_no_block(tmp_path, capsys):
    options = [*SMALL, "--preset", "sparse", "--topk", "0.1", "--steps", "1"]
    assert main(["generate", CAPTION, "-o", str(tmp_path / "circle.mp4"), *options, "-v"]) == 0
    assert "SLA 1/2 blocks, where the published rule keeps none" in capsys.readouterr().out
    assert (tmp_path / "circle.mp4").stat().st_size > 0


def test_generate_says_that_a_short_video_s_attention_is_dense(tmp_path, capsys):
    options = [*SMALL, "--preset", "block_sparse", "--steps", "1"]
    assert main(["generate", CAPTION, "-o", str(tmp_path / "circle.mp4"), *options]) == 0
    assert "18 tokens, fewer than min_tokens=8192" in capsys.readouterr().out


def test_verify_shows_what_a_mass_keeps(tmp_path):
    options = ["--preset", "block_sparse", "--mass", "0.3", "--min-tokens", "0", "--steps", "1"]
    main(["verify", *SMALL, *options, "--json", str(tmp_path / "verify.json")])  # the error may be above the limits
    content = json.loads((tmp_path / "verify.json").read_text())
    shares = [share for of_block in content["kept"].values() for share in of_block.values()]
    assert len(shares) == 6
    assert max(shares) < 1
    assert content["settings"] | {"mass": 0.3, "min_tokens": 0} == content["settings"]
    assert "topk" not in content["settings"]


def test_evaluate_puts_the_fine_tuned_model_beside_the_dense_one(tmp_path, monkeypatch):
    has_projections, evaluate = {}, commands.evaluate

    def watched(pipe, call, tuned, **options):
        for name, given in {"dense": pipe, "fine-tuned": tuned}.items():
            has_projections[name] = hasattr(given.transformer.blocks[0].attn1, "proj_l")
        return evaluate(pipe, call, tuned=tuned, **options)

    monkeypatch.setattr(commands, "evaluate", watched)
    options = ["-n", "1", "--steps", "1", "--json", str(tmp_path / "sparse.json")]
    assert main(["evaluate", *SMALL, *SPARSE, *options]) == 0
    results = json.loads((tmp_path / "sparse.json").read_text())["results"]
    assert has_projections == {"dense": False, "fine-tuned": True}
    assert [one["variant"] for one in results] == ["unpatched", "exact", "sparse, topk 0.7, blocks 16×16"]
    assert results[1]["psnr_to_fp32"] > 80
    assert results[2]["psnr_to_fp32"] < 60


def test_verify_builds_a_config_with_projections(tmp_path, capsys):
    size = ["--height", "64", "--width", "80", "--frames", "13", "--steps", "1", "--device", "cpu"]  # 80 tokens
    options = ["--config", "tiny", "--layers", "1", "--preset", "sparse", "--topk", "0.7"]
    assert main(["verify", *options, *size, "--json", str(tmp_path / "verify.json")]) == 0
    assert "the block and the VAE are within the allowed error" in capsys.readouterr().out
    content = json.loads((tmp_path / "verify.json").read_text())
    assert content["settings"] | {"preset": "sparse", "topk": 0.7} == content["settings"]
    assert {"sparse-linear attention", "choice of key blocks"} <= {part["part"] for part in content["parts"]}


def test_a_folder_that_carries_projections(with_projections, capsys):
    size = ["--height", "32", "--width", "32", "--frames", "5", "--steps", "1", "--device", "cpu"]
    assert main(["verify", "--model", str(with_projections), *size, *SPARSE]) == 0
    assert "SLA 1/1 blocks" in capsys.readouterr().out


def test_projections_are_the_given_transformer_s(saved_models, with_projections, capsys):
    """Not those of the pipeline, whose own transformer does not run."""
    plain, trained = saved_models / "t2v", with_projections
    size = ["--height", "32", "--width", "32", "--frames", "5", "--steps", "1", "--device", "cpu"]
    assert main(["verify", "--model", str(plain), "--transformer", str(trained / "transformer"), *size, *SPARSE]) == 0
    assert "SLA 1/1 blocks" in capsys.readouterr().out
    line = error_of(capsys, "verify", "--model", trained, "--transformer", plain / "transformer", *size, *SPARSE)
    assert "has no proj_l" in line


@pytest.mark.parametrize("kind", ["file", "folder", "pipeline"])
def test_weights_with_projections_are_refused_in_other_tiers(saved_models, with_projections, tmp_path, capsys, kind):
    """They would run with dense attention."""
    given = with_projections / "transformer"
    if kind == "file":
        model, given = tiny_wan_transformer(), tmp_path / "TurboWan2.1.pth"
        torch.save(with_proj_l(official_state_dict(model), model), given)
    options = ["--model", saved_models / "t2v", "--transformer", given, *TINY]
    what = f"--transformer {given}"
    if kind == "pipeline":
        options = ["--model", with_projections, *TINY]
        what = f"the transformer of --model {with_projections}"
    generate = ["generate", "a fox", "-o", tmp_path / "out.mp4", *options]
    told = f"{what} was trained with sparse-linear attention (it has proj_l), which"
    for command in (generate, ["compare", *options]):
        for preset in ("exact", "quantized"):
            line = error_of(capsys, *command, "--preset", preset)
            assert f"{told} --preset {preset} leaves out; give --preset sparse." in line
    line = error_of(capsys, *generate, "--no-patch")
    assert f"{told} --no-patch leaves out; give --preset sparse, without --no-patch." in line
    assert main(list(map(str, [*generate, *SPARSE]))) == 0


def test_a_folder_without_projections_is_refused(saved_models, capsys):
    line = error_of(capsys, "verify", "--model", saved_models / "t2v", "--device", "cpu", *SPARSE)
    assert "has no proj_l" in line
    assert "(SLA); give them as --transformer, or another --preset: 'block_sparse', whose" in line
