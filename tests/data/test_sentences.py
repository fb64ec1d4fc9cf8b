from crossbow.data.sentences import END, PAD, START, UNKNOWN, Words, rows, said, told


def test_words_are_told_apart_and_rare_ones_are_not() -> None:
    words = Words.of(["A red circle.", "a red square", "A circle"], at_least=2)
    assert words.words[4:] == ["a", "circle", "red"]
    assert words.encode("a RED square!") == [4, 6, UNKNOWN]
    assert words.decode(words.encode("red circle")) == "red circle"


def test_what_is_told_is_what_was_to_be_said_one_place_before() -> None:
    sentences = rows([[7, 8], [9], []], length=4)
    assert sentences.tolist() == [[7, 8, END, PAD], [9, END, PAD, PAD], [END, PAD, PAD, PAD]]
    before = told(sentences)
    assert before[:, 0].tolist() == [START] * 3
    assert before[:, 1:].equal(sentences[:, :-1])


def test_a_row_says_what_was_laid_out() -> None:
    for tokens in ([7, 8], [9], [], [5, 6, 7, 8]):
        assert said(rows([tokens], length=5)[0].tolist()) == tokens
    assert said(rows([[5, 6, 7, 8]], length=3)[0].tolist()) == [5, 6, 7]
