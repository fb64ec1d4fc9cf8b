from crossbow.data.help_pages import aligned, paragraphs

PAGE = """<html><head><title>no</title></head><body><p>menu</p>
<h1 id="hd1" dir="auto">Insert  Table</h1>
<p id="p1" class="paragraph"><span class="avis">Shows <b>all</b> commands.<br>And</span> more &amp; more</p>
<p id="p2">Press <span class="switchinline"><span hidden="true" class="MAC">Command</span>Ctrl</span></p>
<p id="p3" class="code">Sub Main</p>
<table><tr><td><p id="p4">A cell<p id="p5">and another</table>
<p id="p6">first</p><p id="p6">second</p>
<p id="p7"></p>
"""  # noqa: E501


def test_paragraphs_are_read_by_id() -> None:
    assert paragraphs(PAGE) == {
        "hd1": "Insert Table",
        "p1": "Shows all commands. And more & more",
        "p2": "",
        "p3": "",
        "p4": "A cell",
        "p5": "and another",
        "p6": "",
        "p7": "",
    }


def test_pairs_are_translated_paragraphs_that_both_pages_have() -> None:
    source = {"b": {"1": "yes", "2": "OK", "3": "one", "4": ""}, "a": {"1": "yes"}, "c": {"1": "x"}}
    target = {"b": {"1": "jawohl", "2": "OK", "4": "vier"}, "a": {"1": "ja"}, "d": {"1": "y"}}
    assert list(aligned(source, target)) == [("yes", "ja"), ("yes", "jawohl")]


def test_a_pair_that_comes_again_counts_once() -> None:
    pages = {"a": {"1": "yes"}, "b": {"1": "yes"}}
    assert list(aligned(pages, {k: {"1": "ja"} for k in pages})) == [("yes", "ja")]
