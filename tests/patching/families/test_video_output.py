"""A patched pipeline returns diffusers' own bits as "np", "pt" and "pil", or leaves the conversion to diffusers."""

import copy
import io
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from diffusers.video_processor import VideoProcessor

import turbo_rcm_patch as trp
from tests.patching.pairs import attributes_of
from tests.tiny_wan import tiny_call, tiny_wan_pipeline
from turbo_rcm_patch.patching.families.vae import finished, video_output
from turbo_rcm_patch.patching.families.vae.finished import Mark, mark_finished, marks_of
from turbo_rcm_patch.patching.families.vae.video_output import NOTE, postprocess_video

DEVICES = pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])


def decoded(batch=2, channels=3, frames=5, height=9, width=7, dtype=torch.float32, device="cpu"):
    """Return a video in [-1.2, 1.2]. Its first values are halves of 1 / 255, which are rounded to even."""
    video = 1.2 * (2 * torch.rand(batch, channels, frames, height, width) - 1)
    halves = ((torch.arange(256) + 0.5) / 255 * 2 - 1)[: video.numel()]
    video.flatten()[: len(halves)] = halves
    return video.to(device, dtype)


def same(ours, theirs):
    """Types, dtypes, shapes and every bit."""
    if isinstance(theirs, list):
        return type(ours) is list and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, np.ndarray):
        kind = (theirs.dtype, theirs.shape, theirs.flags.writeable)
        return kind == (ours.dtype, ours.shape, ours.flags.writeable) and np.array_equal(ours, theirs)
    if isinstance(theirs, torch.Tensor):
        return (ours.dtype, ours.device) == (theirs.dtype, theirs.device) and torch.equal(ours, theirs)
    kind = (type(theirs), theirs.mode, theirs.size)
    return kind == (type(ours), ours.mode, ours.size) and ours.tobytes() == theirs.tobytes()


@DEVICES
@DTYPES
@pytest.mark.parametrize("output_type", ["np", "pt", "pil"])
@pytest.mark.parametrize("batch", [1, 2])
def test_bit_for_bit(on, dtype, output_type, batch, monkeypatch):
    processor, video = VideoProcessor(vae_scale_factor=8), decoded(batch, dtype=dtype, device=on)
    expected = processor.postprocess_video(video, output_type)
    for piece_bytes in (1, 3 * 9 * 7 * dtype.itemsize * 2, 2**20):  # of 5 frames: one by one, 2 + 2 + 1, all at once
        monkeypatch.setattr(video_output, "PIECE_BYTES", piece_bytes)
        assert same(postprocess_video(processor, video, output_type), expected)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_image_keeps_its_pixels_when_another_piece_takes_the_memory(channels):
    frame = np.full((9, 7, channels), 3, np.uint8)
    image = video_output._image(frame)
    frame[:] = 7
    assert np.array_equal(np.asarray(image).reshape(frame.shape), np.full_like(frame, 3))


def test_images_are_made_while_later_frames_are_on_their_way(monkeypatch):
    monkeypatch.setattr(video_output, "PIECE_BYTES", 1)  # one frame
    order, pieces, image = [], video_output.pieces_on_cpu, video_output._image
    monkeypatch.setattr(
        video_output, "pieces_on_cpu", lambda *args: (order.append("piece") or piece for piece in pieces(*args))
    )
    monkeypatch.setattr(video_output, "_image", lambda frame: order.append("image") or image(frame))
    postprocess_video(VideoProcessor(), decoded(1), "pil")
    assert order == ["piece", "image"] * 5


def test_all_images_of_a_piece_are_finished_before_the_next_piece_takes_its_memory(monkeypatch):
    processor, video = VideoProcessor(), decoded(2, frames=7)
    expected = processor.postprocess_video(video, "pil")
    monkeypatch.setattr(video_output, "PIECE_BYTES", 3 * 3 * 9 * 7 * 4)  # 3 + 3 + 1 frames
    pieces, image = video_output.pieces_on_cpu, video_output._image

    def spoilt_later(*args):
        for piece in pieces(*args):
            yield piece
            piece.fill_(77)

    def slow(frame):
        time.sleep(0.01)
        return image(frame)

    monkeypatch.setattr(video_output, "pieces_on_cpu", spoilt_later)
    monkeypatch.setattr(video_output, "_image", slow)
    assert same(postprocess_video(processor, video, "pil"), expected)


def test_no_thread_is_left_even_after_an_error():
    threads = threading.active_count()
    postprocess_video(VideoProcessor(), decoded(), "pil")
    with pytest.raises(TypeError):
        postprocess_video(VideoProcessor(), decoded(channels=5), "pil")
    assert threading.active_count() == threads


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits(on, dtype):
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    values = values.nan_to_num(nan=0.0)[:65535]  # a multiple of 3
    video, processor = values.reshape(1, 3, 5, 17, 257).to(on), VideoProcessor()
    for output_type in ("np", "pil"):
        theirs = processor.postprocess_video(video, output_type)
        assert same(postprocess_video(processor, video, output_type), theirs)


@DEVICES
@pytest.mark.parametrize("output_type", ["np", "pil"])
@pytest.mark.parametrize("channels", [1, 4])
def test_other_channels_and_a_video_that_is_no_contiguous_tensor(on, output_type, channels, monkeypatch):
    monkeypatch.setattr(video_output, "PIECE_BYTES", 1)
    processor, video = VideoProcessor(), decoded(channels=channels, device=on).transpose(3, 4)
    assert same(postprocess_video(processor, video, output_type), processor.postprocess_video(video, output_type))


@pytest.mark.parametrize("output_type", ["np", "pil"])
def test_a_processor_that_does_not_normalize(output_type):
    processor, video = VideoProcessor(do_normalize=False), decoded().clamp(0, 1)
    expected = processor.postprocess_video(video, output_type)
    assert same(postprocess_video(processor, video, output_type), expected)
    assert not same(VideoProcessor().postprocess_video(video, output_type), expected)


def error_of(function, *args, **kwargs):
    with pytest.raises(Exception) as caught:  # noqa: PT011 (whichever it is)
        function(*args, **kwargs)
    return type(caught.value), str(caught.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("video", "output_type"),
    [
        (decoded(), "latent"),
        (decoded(), "mp4"),
        (decoded()[0], "np"),
        (decoded()[:0], "np"),
        (decoded().requires_grad_(), "np"),
        (decoded(channels=5), "pil"),
    ],
)
def test_what_diffusers_refuses_is_refused_alike(video, output_type):
    processor = VideoProcessor()
    expected = error_of(processor.postprocess_video, video, output_type)
    assert error_of(postprocess_video, processor, video, output_type) == expected


def test_what_is_not_known_is_left_to_diffusers():
    processor = VideoProcessor()
    whole = (decoded() * 3).to(torch.int64)
    assert same(postprocess_video(processor, whole, "np"), processor.postprocess_video(whole, "np"))
    video, options = decoded(), {"do_denormalize": [True, False, True, False, False]}
    expected = processor.postprocess_video(video, "np", **options)
    assert same(postprocess_video(processor, video, "np", **options), expected)


@pytest.mark.parametrize("variant", ["t2v", "i2v", "v2v", "wan22"])
@pytest.mark.parametrize("output_type", ["np", "pt", "pil"])
def test_a_patched_pipeline_returns_what_diffusers_makes_of_its_video(variant, output_type, monkeypatch):
    pipe, videos = tiny_wan_pipeline(variant), []
    whole = VideoProcessor.postprocess_video
    with trp.patch(pipe):
        monkeypatch.setattr(video_output, "_is_decoded", lambda video: videos.append(video) or True)
        result = pipe(**tiny_call(variant, output_type=output_type, guidance_scale=1.0)).frames
    if output_type == "pt":
        assert isinstance(result, torch.Tensor)
        assert not videos
    else:
        assert same(result, whole(pipe.video_processor, videos[0], output_type))


def test_of_two_transformers_the_first_has_the_video_with_it():
    pipe = tiny_wan_pipeline("wan22")
    patch = trp.patch(pipe)
    trp.restore(pipe.transformer_2)
    assert "postprocess_video" in vars(pipe.video_processor)
    trp.restore(pipe.transformer)
    assert "postprocess_video" not in vars(pipe.video_processor)
    assert patch.active  # the VAE is left
    trp.restore(pipe)
    assert not patch.active


def test_a_transformer_alone_has_no_video():
    pipe = tiny_wan_pipeline()
    with trp.patch(pipe.transformer) as patch:
        assert "postprocess_video" not in vars(pipe.video_processor)
        assert "video output" not in patch.summary()


def test_a_failed_patch_leaves_the_processor(monkeypatch):
    pipe = tiny_wan_pipeline()
    attributes = attributes_of(pipe.transformer)

    def failing(journal, target, config):
        video_output.patch_video_output(journal, target, config)
        raise MemoryError("at last")

    monkeypatch.setattr("turbo_rcm_patch.patching.apply.patch_video_output", failing)
    with pytest.raises(MemoryError):
        trp.patch(pipe)
    assert "postprocess_video" not in vars(pipe.video_processor)
    assert attributes_of(pipe.transformer) == attributes


def test_a_shared_processor_is_patched_once():
    first, second = tiny_wan_pipeline(), tiny_wan_pipeline(seed=5)
    second.video_processor = first.video_processor
    ours, theirs = trp.patch(first), trp.patch(second)
    bound = vars(first.video_processor)["postprocess_video"]
    assert NOTE in ours.summary()
    assert NOTE in theirs.summary()
    theirs.restore()
    assert vars(first.video_processor)["postprocess_video"] is bound
    theirs = trp.patch(second)
    ours.restore()
    assert "postprocess_video" not in vars(first.video_processor)
    assert "video output: diffusers' own: not patched" in theirs.summary()
    theirs.restore()


class OwnProcessor(VideoProcessor):
    """A user's own video processor."""


def users_method(*args):
    raise AssertionError("the user's method is called by nobody in these tests")


REASONS = {
    "tests OwnProcessor": lambda pipe, monkeypatch: setattr(pipe, "video_processor", OwnProcessor()),
    "replaced postprocess_video": lambda pipe, _: setattr(pipe.video_processor, "postprocess_video", users_method),
    "replaced denormalize": lambda pipe, _: setattr(pipe.video_processor, "denormalize", users_method),
    "replaced numpy_to_pil": lambda pipe, monkeypatch: monkeypatch.setattr(
        VideoProcessor, "numpy_to_pil", staticmethod(users_method)
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_users_own_is_left_alone_and_named(reason, monkeypatch):
    pipe = tiny_wan_pipeline()
    REASONS[reason](pipe, monkeypatch)
    before = dict(vars(pipe.video_processor))
    with trp.patch(pipe) as patch:
        assert vars(pipe.video_processor) == before
        assert f"video output: diffusers' own: {reason}" in patch.summary()
    assert vars(pipe.video_processor) == before


def test_what_is_replaced_later_counts():
    pipe, video = tiny_wan_pipeline(), decoded()
    with trp.patch(pipe) as patch:
        pipe.video_processor.denormalize = lambda images: images * 0 + 0.25
        assert (pipe.video_processor.postprocess_video(video) == 0.25).all()
        assert "video output: diffusers' own: replaced denormalize" in patch.summary()
        del pipe.video_processor.denormalize
        assert NOTE in patch.summary()
        pipe.video_processor = VideoProcessor()
        assert "video output: diffusers' own: not patched" in patch.summary()


def test_a_later_wrapper_holds_up_restore():
    pipe = tiny_wan_pipeline()
    patch = trp.patch(pipe)
    ours = pipe.video_processor.postprocess_video
    pipe.video_processor.postprocess_video = lambda *args: ours(*args)
    with pytest.raises(trp.PatchError, match=r"VideoProcessor.*replaced after the patch"):
        patch.restore()
    pipe.video_processor.postprocess_video = ours
    patch.restore()
    assert "postprocess_video" not in vars(pipe.video_processor)


def test_vae_false_leaves_the_output_alone():
    pipe = tiny_wan_pipeline()
    with trp.patch(pipe, trp.Exact(vae=False)) as patch:
        assert "postprocess_video" not in vars(pipe.video_processor)
        assert "video output: diffusers' own: vae=False" in patch.summary()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_of_a_patched_pipeline_convert_for_themselves(copied):
    pipe, video = tiny_wan_pipeline(), decoded()
    expected = pipe.video_processor.postprocess_video(video, "np")
    patch = trp.patch(pipe)
    twin = copied(pipe)
    patch.restore()
    assert twin.video_processor.postprocess_video.__self__ is twin.video_processor
    assert same(twin.video_processor.postprocess_video(video, "np"), expected)
    trp.restore(twin)
    assert "postprocess_video" not in vars(twin.video_processor)


class SlowStage:
    """A stage whose copy happens as late as it may, and that tells when it is used again too early."""

    made = 0

    def __init__(self, piece):
        SlowStage.made += 1
        self.memory, self.pending = torch.full_like(piece, 77), None

    def fill(self, piece):
        assert self.pending is None, "filled before it was emptied"
        self.memory.fill_(99)  # what a consumer still reads of the piece before is spoilt
        self.pending = piece

    def content(self):
        content = self.memory[: len(self.pending)].copy_(self.pending)
        self.pending = None
        return content


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_piece_waits_for_its_copy_and_is_good_until_the_next(count, monkeypatch):
    monkeypatch.setattr(video_output, "_Stage", SlowStage)
    SlowStage.made, pieces = 0, list(torch.arange(4.0 * count).view(count, 4))
    pieces[-1], launched = pieces[-1][:3], []

    def launch():
        for index, piece in enumerate(pieces):
            launched.append(index)
            yield piece

    for index, piece in enumerate(video_output._through_pinned_memory(launch())):
        assert launched[-1] == min(index + 1, count - 1)  # the next one is on its way
        assert torch.equal(piece, pieces[index])
    assert index == count - 1
    assert SlowStage.made == min(count, 2)


def test_pinned_memory_is_the_hosts_with_another_default_device(events, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
    piece = torch.arange(3.0)
    with torch.device("meta"):
        stage = video_output._Stage(piece)
        assert stage._memory.device.type == "cpu"


class Event:
    """An event that tells which one was waited for."""

    def __init__(self, name, waits):
        self.name, self.waits = name, waits

    def wait(self):
        self.waits.append(self.name)


@pytest.mark.parametrize(("piece", "waits"), [(1, "aabbbc"), (2, "abc"), (4, "bc"), (6, "c")])
def test_a_piece_waits_for_its_own_frames_alone(piece, waits):
    waited, video = [], torch.arange(6.0)
    marks = [Mark(frames, Event(name, waited), 0, 0) for name, frames in {"a": 2, "b": 5, "c": 6}.items()]
    assert torch.cat(list(video_output._finished(video.split(piece), marks))).equal(video)
    assert "".join(waited) == waits


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def events(monkeypatch):
    """Stand-ins for CUDA's events."""
    made = []
    event = type("Event", (), {"record": lambda self, stream: made.append(self)})
    monkeypatch.setattr(finished.torch.cuda, "Event", event)
    monkeypatch.setattr(finished.torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(finished.torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def marked(video, *frames):
    for count in frames:
        mark_finished(video, count)
    return marks_of(video)


def test_marks_tell_when_frames_are_finished(events):
    video = decoded().as_subclass(OnGpu)
    assert [mark.frames for mark in marked(video, 1, 3, 5)] == [1, 3, 5]
    assert [mark.event for mark in marks_of(video)] == events
    assert marks_of(decoded()) == marks_of(video[:, :, :2]) == []
    video[0, 0, 0, 0, 0] = 0  # an event from before says nothing of this
    assert marks_of(video) == []
    again = torch.load(io_of(video), weights_only=False)
    assert again.equal(video)


def io_of(video):
    file = io.BytesIO()
    torch.save(video, file)
    file.seek(0)
    return file


def test_a_video_with_new_data_has_no_marks(events):
    """Its new frames may come later than the events."""
    video = decoded().as_subclass(OnGpu)
    assert marked(video, 5)
    before = video.data
    video.data = video.data * 2
    assert marks_of(video) == []
    video.data = before
    assert marks_of(video)


def test_half_a_video_and_videos_elsewhere_have_no_marks(events, monkeypatch):
    assert marked(decoded().as_subclass(OnGpu), 1, 3) == []
    assert marked(decoded(), 5) == []
    with torch.inference_mode():
        assert marked(decoded().as_subclass(OnGpu), 5) == []
    monkeypatch.setattr(finished.torch.cuda, "is_current_stream_capturing", lambda: True)
    assert marked(decoded().as_subclass(OnGpu), 5) == []
    assert len(events) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("output_type", ["np", "pil"])
def test_the_first_frames_leave_the_gpu_while_it_makes_the_others(output_type, monkeypatch):
    video, processor = decoded(2, 3, 8, 40, 56, torch.bfloat16, "cuda"), VideoProcessor()
    expected = processor.postprocess_video(video, output_type)
    monkeypatch.setattr(video_output, "PIECE_BYTES", 3 * 40 * 56 * 2)  # one frame
    mark_finished(warm := video.clone(), 8)
    postprocess_video(processor, warm, output_type)  # compiles and allocates
    whole, unfinished = torch.zeros_like(video), []
    for frames in (2, 8):
        begin = 0 if frames == 2 else 2
        torch.cuda._sleep(10**9 if frames == 2 else 4 * 10**9)  # much longer than the host takes for the first frames
        whole[:, :, begin:frames] = video[:, :, begin:frames]
        mark_finished(whole, frames)
    last = marks_of(whole)[-1].event
    pieces = video_output.pieces_on_cpu
    monkeypatch.setattr(
        video_output,
        "pieces_on_cpu",
        lambda *args: (unfinished.append(not last.query()) or piece for piece in pieces(*args)),
    )
    assert same(postprocess_video(processor, whole, output_type), expected)
    assert unfinished[0]
    assert not unfinished[-1]


@pytest.mark.gpu
def test_a_patched_vae_marks_what_it_decodes():
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16)
    vae = pipe.vae.to("cuda", torch.bfloat16)
    z = torch.randn(1, vae.config.z_dim, 4, 4, 6, device="cuda", dtype=torch.bfloat16)
    with trp.patch(pipe, trp.Exact(vae_chunk=1)), torch.no_grad():
        sample = vae.decode(z).sample
        assert [mark.frames for mark in marks_of(sample)] == [1, 5, 9, 13]
        expected = VideoProcessor.postprocess_video(pipe.video_processor, sample, "np")
        assert same(pipe.video_processor.postprocess_video(vae.decode(z).sample, "np"), expected)


@pytest.mark.gpu
def test_nothing_but_the_result_stays_on_the_gpu():
    video = decoded(1, 3, 81, 120, 208, torch.bfloat16, "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    postprocess_video(VideoProcessor(), video, "np")
    assert torch.cuda.memory_allocated() == before
