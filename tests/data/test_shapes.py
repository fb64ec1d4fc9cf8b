import torch

from crossbow.data.sentences import said
from crossbow.data.shapes import COLORS, FORMS, LENGTH, RELATIONS, SIDE, SIZES, shapes


def test_a_sample_depends_on_its_number_and_the_seed_alone() -> None:
    few, many, other = shapes(20, 5), shapes(25, 1), shapes(20, 5, seed=1)
    assert few.test.inputs.equal(many.train.inputs[20:])
    assert few.train.targets.shape == other.train.targets.shape
    assert not few.train.inputs.equal(other.train.inputs)


def test_captions_say_what_is_in_the_image() -> None:
    data = shapes(200, 1)
    for row, target in zip(data.train.inputs, data.train.targets, strict=True):
        words = data.decode(said(target.tolist())).split()
        _, size, color, form, relation, *_ = words
        assert (size in SIZES, color in COLORS, form in FORMS) == (True, True, True)
        image = row[: 3 * SIDE**2].view(3, SIDE, SIDE).float()
        first = image[:, : SIDE // 3] if relation == "above" else image[:, :, : SIDE // 3]
        brightest = first.flatten(1)[:, first.sum(0).flatten().argmax()]
        wanted = torch.tensor(COLORS[color]).float()
        assert torch.cosine_similarity(brightest, wanted, dim=0) > 0.97, words


def test_sizes_and_relations_show() -> None:
    data = shapes(400, 1)
    lit = (data.train.inputs[:, : 3 * SIDE**2].view(-1, 3, SIDE**2).amax(1) > 60).float().mean(1)
    captions = [data.decode(said(row.tolist())) for row in data.train.targets]
    by_size = {
        size: torch.stack([x for x, c in zip(lit, captions, strict=True) if c.count(size) == 2])
        for size in SIZES
    }
    assert by_size["large"].mean() > 2 * by_size["small"].mean()
    assert {relation in " ".join(captions) for relation in RELATIONS} == {True}
    assert all(len(caption.split()) < LENGTH for caption in captions)
