from turbo_rcm_patch.tables import table

ROWS = [["", "b"], ["long", "1"], ["x", "22"]]


def test_a_terminal_gets_aligned_columns():
    assert table(ROWS) == "       b\nlong   1\nx     22"


def test_words_are_flush_left():
    assert table(ROWS, numbers=False) == "      b\nlong  1\nx     22"


def test_a_page_gets_markdown():
    assert table(ROWS, markdown=True) == "|  | b |\n|---|---|\n| long | 1 |\n| x | 22 |"
