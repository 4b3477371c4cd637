import pytest
from words.nouns import article, counted, listed, plural


@pytest.mark.parametrize(("noun", "said"), [("city", "cities"), ("sky", "skies"), ("fly", "flies"), ("lady", "ladies"), ("berry", "berries")])
def test_a_consonant_before_y(noun, said):
    assert plural(noun) == said


@pytest.mark.parametrize(("noun", "said"), [("box", "boxes"), ("bus", "buses"), ("church", "churches"), ("dish", "dishes"), ("waltz", "waltzes")])
def test_a_hiss_at_the_end(noun, said):
    assert plural(noun) == said


@pytest.mark.parametrize(("noun", "said"), [("man", "men"), ("child", "children"), ("mouse", "mice"), ("foot", "feet")])
def test_nouns_with_a_plural_of_their_own(noun, said):
    assert plural(noun) == said


@pytest.mark.parametrize("noun", ["cat", "dog", "day", "key"])
def test_all_others(noun):
    assert plural(noun) == noun + "s"


@pytest.mark.parametrize(("number", "said"), [(0, "0 cats"), (1, "1 cat"), (2, "2 cats"), (-1, "-1 cat"), (12, "12 cats")])
def test_counted(number, said):
    assert counted(number, "cat") == said


@pytest.mark.parametrize(
    ("nouns", "said"),
    [([], ""), (["tea"], "tea"), (["tea", "milk"], "tea and milk"), (["tea", "milk", "ice"], "tea, milk and ice"), ("abcd", "a, b, c and d")],
)
def test_listed(nouns, said):
    assert listed(nouns) == said


def test_another_word_before_the_last():
    assert listed(["tea", "milk", "ice"], "or") == "tea, milk or ice"


@pytest.mark.parametrize(("noun", "said"), [("apple", "an apple"), ("egg", "an egg"), ("pear", "a pear"), ("Ohm", "an Ohm"), ("bee", "a bee")])
def test_article(noun, said):
    assert article(noun) == said
