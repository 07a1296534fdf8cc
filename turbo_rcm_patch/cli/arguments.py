"""Options of the commands, and what is given of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path
from typing import NoReturn

from .. import __version__
from ..config import PRESETS, VAE_8BIT
from ..recipes import RECIPES
from ..shapes.grammar import EXAMPLES
from .errors import CommandError
from .files import check_output
from .sizes import SizeRules

VERBOSE = (
    "show other packages' warnings too; with generate also the kernel of every step, with info --model also those of "
    "the tiny model"
)
DTYPES = ("float32", "bfloat16", "float16")
OWN_SAMPLER = "none"  # the value of --recipe that keeps the pipeline's scheduler
LORAS = ("lora", "lora_2")
CONFIG_OPTIONS = ("topk", "mass", "min_tokens", "keep", "vae")  # of the patch, beside --preset
_PROMPT = f"a description of the video; the embedded model knows captions like '{EXAMPLES[0]}'"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line. A wrong option exits with code 2 and one line."""
    parser = _Parser(prog="turbo-rcm", description="Few-step video generation with Wan pipelines on fused kernels.")
    parser.add_argument("--version", action="version", version=f"turbo-rcm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_compare(commands)
    _add_verify(commands)
    _add_evaluate(commands)
    _add_info(commands)
    _add_convert(commands)
    _add_demo(commands)
    _add_tune(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        of_prompt = not unknown[0].startswith("-") and "prompt" in arguments
        hint = "; put a prompt of several words in quotes" if of_prompt else ""
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return arguments


def spelled(name: str) -> str:
    """Return an option as the shell has it, by its name in the arguments."""
    return f"--{name.replace('_', '-')}"


def step_counts(arguments: argparse.Namespace) -> tuple[int | None, ...]:
    """Return all numbers of steps that the command runs. None: the model's own."""
    return arguments.steps if isinstance(arguments.steps, tuple) else (arguments.steps,)


def config_options(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options of the configuration that are given, by name.

    Raises CommandError for a file of --keep beside other names.
    """
    given = {name: value for name in CONFIG_OPTIONS if (value := getattr(arguments, name, None)) is not None}
    if any(name.endswith(".json") for name in given.get("keep", ())):
        if len(given["keep"]) > 1:
            raise CommandError(f"--keep takes one file alone, or names; given are {' and '.join(given['keep'])}.")
        (given["keep"],) = given["keep"]
    return given


def as_path(text: str) -> Path:
    """Return a path. The shell leaves ~ as it is in quotes and after "="."""
    return Path(expanduser(text))


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage in front of it. Options cannot be shortened."""

    def __init__(self, **options: object):
        super().__init__(**options, allow_abbrev=False)  # evaluate's --n, for -n, would be --negative-prompt

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def check_video(parser: argparse.ArgumentParser, options: argparse.Namespace, rules: SizeRules | None = None) -> None:
    """Let an example end with a usage error if its --size and --output give no video. rules: Wan's by default."""
    try:
        check_output("--output", Path(options.output), (".mp4",))
        (rules or SizeRules()).check(*options.size or (None, None, None))
    except CommandError as error:
        parser.error(re.sub("--(height|width|frames)", r"--size: \1", str(error)))


def _add_command(commands, name: str, summary: str) -> argparse.ArgumentParser:
    """Return the parser of a new command. Its own help begins with the summary as a sentence."""
    return commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")


def _add_generate(commands) -> None:
    parser = _add_command(commands, "generate", "generate a video")
    parser.add_argument("prompt", help=_PROMPT)
    parser.add_argument("-o", "--output", type=as_path, required=True, metavar="OUT.mp4", help="the video to write")
    add_frame_rate(parser)
    parser.add_argument("--no-patch", action="store_true", help="run diffusers' own blocks")
    gpus = "make the video on this many GPUs at a time, with a process and the whole model on each (default 1)"
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help=gpus)
    parser.set_defaults(patched=None, is_first=True)
    add_distilled_options(parser)
    add_generation_options(parser)
    _add_vram(parser, "the patched pipeline")
    _add_text_encoder(
        parser, "store most of the text encoder's weights in 8 bits: 4 GB less, slightly other embeddings"
    )
    tiny = "decode with a tiny VAE of TAEHV, such as taew2_1.safetensors: faster, with less memory, of lower quality"
    parser.add_argument("--tiny-vae", type=as_path, metavar="FILE", help=tiny)
    _add_vae(parser)


def add_frame_rate(parser: argparse.ArgumentParser) -> None:
    """Add --fps."""
    rate = "frames per second (default: the model's: 16, TI2V-5B and LTX-2 24; LTX-2's sound depends on it)"
    parser.add_argument("--fps", type=int, help=rate)


def _add_vram(parser: argparse.ArgumentParser, what: str) -> None:
    text = f"fit {what} into this much of the GPU's memory, such as 8GB: what does not fit streams"
    parser.add_argument("--vram", metavar="AMOUNT", help=text)


def _add_text_encoder(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--text-encoder", choices=("8bit",), help=text)


def _add_vae(parser: argparse.ArgumentParser) -> None:
    text = "on a GPU, run most convolutions of the VAE's decoder in 8 bits, with frames that differ slightly"
    parser.add_argument("--vae", choices=(VAE_8BIT,), help=text)


def _add_compare(commands) -> None:
    summary = (
        "generate the same video unpatched, under torch.compile (on a GPU) and patched, and show times and differences"
    )
    parser = _add_command(commands, "compare", summary)
    parser.add_argument("prompt", nargs="?", help=f"{_PROMPT} (the default; a fox with --model)")
    parser.add_argument("--no-compile", action="store_true", help="do not run torch.compile")
    parser.add_argument("--repeats", type=int, default=3, help="measured generations per variant (default 3)")
    parser.add_argument("--json", type=as_path, metavar="OUT.json", help="write all figures with the GPU and versions")
    parser.add_argument("--plot", type=as_path, metavar="OUT.png", help="write a bar chart of the stages")
    parser.add_argument(
        "--video",
        type=as_path,
        metavar="OUT.mp4",
        help="write the videos and their amplified difference side by side; .gif and .webp are animated pictures, a "
        ".png gets three frames",
    )
    add_distilled_options(parser)
    add_generation_options(parser)
    _add_vram(parser, "all variants, without torch.compile,")
    _add_vae(parser)


def _add_verify(commands) -> None:
    summary = "check every patched block against an fp32 oracle; exit code 1 if an error is above its limit"
    parser = _add_command(commands, "verify", summary)
    parser.add_argument("prompt", nargs="?", help=f"{_PROMPT} (the default; a fox with --model)")
    parser.add_argument("--json", type=as_path, metavar="OUT.json", help="write every block's errors")
    parser.add_argument(
        "--config",
        metavar="NAME",
        help="use random weights of a real size, such as wan2.1-1.3b, and structured inputs instead of a model",
    )
    parser.add_argument("--layers", type=int, help="with --config: build only this many blocks")
    keep_out = (
        "with --preset quantized: find the linears and attentions that must leave 8 bits for the limits to hold with "
        "this model, prompt and number of steps, check the result, and write it for --keep"
    )
    parser.add_argument("--keep-out", type=as_path, metavar="OUT.json", help=keep_out)
    add_generation_options(parser)
    _add_vram(parser, "the patched pipeline and the checks")
    _add_vae(parser)


def _add_evaluate(commands) -> None:
    summary = "judge how well videos show held-out captions, unpatched and patched, and how much their frames differ"
    parser = _add_command(commands, "evaluate", summary)
    parser.add_argument("-n", type=int, default=256, help="captions (default 256)")
    parser.add_argument("--batch-size", type=int, help="videos made at a time (default 16, fewer if they are large)")
    parser.add_argument("--json", type=as_path, metavar="OUT.json", help="write all figures with the GPU and versions")
    parser.add_argument(
        "--steps", type=_comma_list, default=(1, 2, 4), help="numbers of denoising steps, 1 to 4 each (default 1,2,4)"
    )
    _add_sampling_options(parser, models="Wan", height="160", width="224", frames="17")
    _add_vram(parser, "each variant, the one in fp32 too,")
    parser.set_defaults(image=None, offload=False)


def _comma_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(number) for number in text.split(",")))  # each once, in the order given
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,2,4") from None


def _add_info(commands) -> None:
    summary = "show the GPU, versions, and the kernel that each op takes here"
    parser = _add_command(commands, "info", summary)
    report = "print it as Markdown to paste into an issue, without the home folder's path and tokens"
    parser.add_argument("--report", action="store_true", help=report)
    parser.add_argument("--json", type=as_path, metavar="OUT.json", help="write the same as JSON")
    memory = (
        "show the GPU memory that a diffusers pipeline or transformer needs in each tier: a folder, a hub id, of which "
        "only the configs are downloaded, or a known size, such as wan2.1-14b"
    )
    parser.add_argument("--model", type=expanduser, metavar="PATH_OR_ID", help=memory)
    vram = "with --model: show where its models would be on a card with this much memory, such as '8 GB' or 8GB"
    parser.add_argument("--vram", metavar="AMOUNT", help=vram)
    _add_text_encoder(
        parser, "with --model: count the text encoder's weights in 8 bits, as generate stores them with it"
    )
    parser.add_argument("--preset", help=f"with --model: one tier alone: {', '.join(PRESETS)} (default: all)")
    for option, text in (("--height", "pixels"), ("--width", "pixels"), ("--frames", "a number 4k+1")):
        default = "480x832 with 81 frames, without --vram 720x1280 too"
        parser.add_argument(option, type=int, help=f"with --model: {text} (default: {default})")
    _add_device_options(parser)


def _add_convert(commands) -> None:
    summary = "store a model's transformers for a tier: in 8 bits, or in diffusers' own format"
    parser = _add_command(commands, "convert", summary)
    source = (
        "the folder of a diffusers pipeline or transformer, or a .pth or .safetensors file of TurboDiffusion, rCM or "
        "ComfyUI (fp8_scaled), or the folder of such a file"
    )
    parser.add_argument("source", type=as_path, metavar="IN", help=source)
    parser.add_argument("target", type=as_path, metavar="OUT", help="the folder to write; it must not exist yet")
    preset = (
        "quantized (the default), block_sparse or sparse, for turbo_rcm_patch.load_converted, or exact, for "
        "from_pretrained"
    )
    parser.add_argument("--preset", default="quantized", help=preset)
    parser.add_argument(
        "--format",
        choices=("mixed", "int8"),
        help="mixed: e4m3 and int8, for sm_89 and newer; int8: for older GPUs too (default: the one for this GPU)",
    )
    _add_keep(parser)
    _add_device_options(parser, dtype="the dtype of all weights that are not in 8 bits (default: bfloat16)")


def _add_keep(parser: argparse.ArgumentParser) -> None:
    keep = (
        "8 bits: leave this module's weights as they are, such as 'blocks.0.*', or compute this attention in the "
        "model's dtype, such as blocks.3.attn1.processor; may be repeated. Or the file of verify --keep-out"
    )
    parser.add_argument("--keep", type=expanduser, action="append", metavar="NAME", help=keep)


def _add_demo(commands) -> None:
    summary = "serve a page for the browser that shows a video unpatched and patched, side by side"
    parser = _add_command(commands, "demo", summary)
    model = "a diffusers Wan pipeline that the page offers besides the embedded one; may be repeated"
    parser.add_argument("--model", type=expanduser, action="append", metavar="PATH_OR_ID", help=model)
    lora = "a few-step LoRA that the page offers, as for generate; may be repeated"
    parser.add_argument("--lora", type=_lora, action="append", metavar="FILE[:SCALE]", help=lora)
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to serve at (default 127.0.0.1: only this machine)"
    )
    parser.add_argument("--port", type=int, default=7860, help="the port to serve at (default 7860)")
    size = "the most pixels that a video's frames may have in all (default: 81 frames of 480x832; CPU: 17 of 160x224)"
    parser.add_argument("--max-pixels", type=int, metavar="N", help=size)
    parser.add_argument("--offload", action="store_true", help="keep only the running model on the GPU")
    _add_device_options(parser)


def _add_tune(commands) -> None:
    summary = "time this package's kernels and PyTorch's on this GPU; the patch then takes the faster ones"
    parser = _add_command(commands, "tune", summary)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--model", type=as_path, metavar="FOLDER", help="the pipeline or transformer whose shapes are timed"
    )
    what.add_argument("--config", metavar="NAME", help="a known size instead (default wan2.1-1.3b)")
    what.add_argument("--reset", action="store_true", help="delete this machine's measurements")
    for option, text in (("--height", "pixels"), ("--width", "pixels"), ("--frames", "a number 4k+1")):
        default = "that of --config, or of the known size with a VAE like --model's"
        parser.add_argument(option, type=int, help=f"{text} (default: {default})")
    parser.add_argument("--device", help="cuda or cuda:N (default: cuda)")
    parser.add_argument("-v", "--verbose", action="store_true", help=VERBOSE)


def add_distilled_options(parser: argparse.ArgumentParser) -> None:
    """Add --lora, --lora-2 and --recipe."""
    lora = "a few-step LoRA: a file, a folder with a file for each expert, or a hub id; SCALE: its strength (default 1)"
    parser.add_argument("--lora", type=_lora, metavar="FILE[:SCALE]", help=lora)
    second = "Wan 2.2: the LoRA of the low-noise expert, also without --lora; SCALE: its own strength (default 1)"
    parser.add_argument("--lora-2", type=_lora, metavar="FILE[:SCALE]", help=second)
    recipe = (
        f"how the model or LoRA was distilled: {', '.join(RECIPES)}; none: keep the pipeline's scheduler (default: "
        "recognised by names and files, otherwise none)"
    )
    parser.add_argument("--recipe", choices=(OWN_SAMPLER, *RECIPES), metavar="NAME", help=recipe)


def _lora(text: str) -> tuple[str, float]:
    text = expanduser(text)
    file, _, scale = text.rpartition(":")
    try:
        return (text, 1.0) if not file or Path(text).exists() else (file, float(scale))
    except ValueError:
        return text, 1.0


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of one generation except the prompt: the model, its preset, steps, seed, size, device."""
    steps = "denoising steps (default: those that the model was distilled to, or 50; embedded model 4)"
    parser.add_argument("--steps", type=int, help=steps)
    transformer = (
        "with --model: a transformer in place of the pipeline's, as a folder of diffusers or of turbo-rcm convert, or "
        "as a .safetensors or .gguf file; with generate also one in 8 bits, such as ComfyUI's fp8_scaled"
    )
    parser.add_argument("--transformer", type=as_path, metavar="PATH", help=transformer)
    second = "Wan 2.2: the same for the low-noise expert, if --transformer is a file or holds one alone"
    parser.add_argument("--transformer-2", type=as_path, metavar="PATH", help=second)
    parser.add_argument("--image", type=as_path, help="the first frame, for an image-to-video model")
    parser.add_argument("--offload", action="store_true", help="keep only the running model on the GPU")
    _add_sampling_options(
        parser,
        models="Wan or LTX-2",
        height="480; LTX-2 512; embedded model 160",
        width="832; LTX-2 768; embedded model 224",
        frames="81; LTX-2 121, of the form 8k+1; embedded model 17",
    )


def _add_sampling_options(
    parser: argparse.ArgumentParser, *, models: str, height: str, width: str, frames: str
) -> None:
    model = f"a diffusers pipeline of {models} (default: a tiny embedded one)"
    parser.add_argument("--model", type=expanduser, metavar="PATH_OR_ID", help=model)
    parser.add_argument(
        "--preset", default="exact", help=f"the tier of the patch: {', '.join(PRESETS)} (default exact)"
    )
    kept = "sparse attention: the share of key blocks that each block of queries keeps (default 0.1, LTX-2: 0.3)"
    parser.add_argument("--topk", type=float, metavar="SHARE", help=kept)
    mass = "block-sparse attention: the share of the estimated attention that each block of queries keeps (default 0.9)"
    parser.add_argument("--mass", type=float, metavar="SHARE", help=mass)
    dense = "block-sparse attention: stay dense below this many tokens (default 8192; the embedded model has 700)"
    parser.add_argument("--min-tokens", type=int, metavar="N", help=dense)
    _add_keep(parser)
    sigma_max = "sample as rCM, from this noise level (the embedded model's: 80; for image to video 200)"
    parser.add_argument("--sigma-max", type=float, help=sigma_max)
    guidance = "guidance scale (default: 1, which is none, for few-step models, or the pipeline's own, such as 5)"
    parser.add_argument("--guidance", type=float, metavar="SCALE", help=guidance)
    second = "Wan 2.2: the guidance scale of the low-noise expert (default: --guidance)"
    parser.add_argument("--guidance-2", type=float, metavar="SCALE", help=second)
    parser.add_argument("--negative-prompt", metavar="TEXT", help="what the video shall not show; needs guidance")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the noise (default 0)")
    parser.add_argument("--height", type=int, help=f"pixels (default {height})")
    parser.add_argument("--width", type=int, help=f"pixels (default {width})")
    parser.add_argument("--frames", type=int, help=f"a number 4k+1 (default {frames})")
    _add_device_options(parser)


def _add_device_options(
    parser: argparse.ArgumentParser, dtype: str = "the model's dtype (default: bfloat16 on a GPU, float32 on the CPU)"
) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help=dtype)
    parser.add_argument("-v", "--verbose", action="store_true", help=VERBOSE)
