"""Lists in messages."""

from tierckpt._text import some


def test_a_short_list_is_shown_whole() -> None:
    assert some([]) == ""
    assert some(["a", "b", "c"]) == "a, b, c"


def test_of_a_long_one_the_first_few_and_the_number_of_the_others() -> None:
    assert some(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert some(range(12), 8) == "0, 1, 2, 3, 4, 5, 6, 7 and 4 more"
    assert some(["a, b", "c", "d", "e"], 2, "; ") == "a, b; c and 2 more"
