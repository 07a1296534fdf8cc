from turbo_rcm_patch.tables import table
from turbo_rcm_patch.wording import counted, with_article

ROWS = [["", "b"], ["long", "1"], ["x", "22"]]


def test_a_terminal_gets_aligned_columns():
    assert table(ROWS) == "       b\nlong   1\nx     22"


def test_words_are_flush_left():
    assert table(ROWS, numbers=False) == "      b\nlong  1\nx     22"


def test_a_page_gets_markdown():
    assert table(ROWS, markdown=True) == "|  | b |\n|---|---|\n| long | 1 |\n| x | 22 |"


def test_words_follow_numbers_and_names():
    assert [counted(count, "frame") for count in (0, 1, 81)] == ["0 frames", "1 frame", "81 frames"]
    names = ("object", "int", "AutoencoderKLWan", "UNet2DModel", "WanPipeline", None)
    found = ["an object", "an int", "an AutoencoderKLWan", "a UNet2DModel", "a WanPipeline", "a None"]
    assert list(map(with_article, names)) == found
