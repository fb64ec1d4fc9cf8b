from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from crossbow.config import DEFAULTS, Config
from crossbow.data import datasets
from crossbow.data.loader import scan
from crossbow.errors import DataError, InputError
from crossbow.optim.build import build_optimizer
from crossbow.optim.schedule import parse
from crossbow.spec import parse_spec
from crossbow.trainer import train
from crossbow.zoo import tasks
from crossbow.zoo.tasks import TASKS

TEXT_TASKS = [name for name, entry in TASKS.items() if entry.data == "text"]
TRANSLATIONS = [name for name, entry in TASKS.items() if entry.data == "parallel"]
SENTENCE_TASKS = [name for name, entry in TASKS.items() if entry.score]
FOLDER_TASKS = ["resnet50-imagenet", "captioner-coco"]
DIGITS_TASKS = [name for name, entry in TASKS.items() if entry.data == "digits"]
FETCHED_TASKS = sorted(set(TASKS) - {*TEXT_TASKS, *TRANSLATIONS, *DIGITS_TASKS, "captioner-shapes"})


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("It is a truth universally acknowledged. " * 200)
    return path


@pytest.mark.parametrize("name", TASKS)
def test_every_recipe_can_be_carried_out(name: str) -> None:
    recipe = TASKS[name].recipe.over(DEFAULTS)
    total = int(recipe.epochs * 1000)
    rate = parse(recipe.schedule, recipe.lr, epoch_samples=1000, total_samples=total)
    assert 0 < max(map(rate, range(0, total, 100))) <= recipe.lr
    assert rate(total) < recipe.lr or parse_spec(recipe.schedule)[0] == "constant"
    build_optimizer(recipe.optimizer, [nn.Parameter(torch.zeros(2, 2))], recipe.lr)


@pytest.mark.parametrize("name", TASKS)
def test_a_recipe_says_the_same_for_any_seed_run_and_machine(name: str) -> None:
    said = {key for key, value in TASKS[name].recipe.to_json().items() if value is not None}
    assert said <= {"batch_size", "epochs", "lr", "optimizer", "schedule", "label_smoothing"}
    assert {"batch_size", "epochs", "lr", "optimizer"} <= said


@pytest.mark.parametrize("name", DIGITS_TASKS)
def test_digits_tasks_learn_in_an_epoch(name: str, tmp_path: Path) -> None:
    result = train(tasks.get(name), Config(epochs=2, run_dir=tmp_path / "run"), quiet=True)
    assert result.metric > 0.8


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_text_tasks_learn_from_any_text(name: str, book: Path, tmp_path: Path) -> None:
    task = tasks.get(name, text=book)
    config = Config(epochs=3, run_dir=tmp_path / "run", eval_every=len(task.train))
    uniform = torch.tensor(float(task.train.classes)).log().item()
    assert train(task, config, quiet=True).metric < uniform - 0.3


@pytest.mark.parametrize("name", FETCHED_TASKS)
def test_a_task_without_its_data_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        tasks.get(name, data_dir=tmp_path)
    if name in FOLDER_TASKS:
        assert f"{tmp_path}/{TASKS[name].data}/" in str(raised.value)
    else:
        assert f"crossbow data fetch {TASKS[name].data}" in str(raised.value)


def test_imagenet_is_read_from_its_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (300, 280), "red")
    for part, name in product(("train", "val"), ("n01440764", "n01443537")):
        (tmp_path / "imagenet" / part / name).mkdir(parents=True)
        image.save(tmp_path / "imagenet" / part / name / "1.JPEG")
    task = tasks.get("resnet50-imagenet", data_dir=tmp_path)
    inputs, targets = next(scan(task.train, [(0, 2)], prepare=task.prepare))
    assert inputs.shape == (2, 3, 224, 224)
    assert targets.tolist() == [0, 1]


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_a_text_task_without_a_text_says_how_to_name_one(name: str) -> None:
    with pytest.raises(InputError, match="--text FILE"):
        tasks.get(name)


def test_a_text_for_a_task_that_reads_none_is_refused(book: Path) -> None:
    with pytest.raises(InputError, match=f"leave out --text {book}"):
        tasks.get("mlp-digits", text=book)


def test_an_unknown_task_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="did you mean 'resnet8-digits'"):
        tasks.get("resnet9-digits")


@pytest.mark.parametrize("name", set(TASKS) - {*TEXT_TASKS, *SENTENCE_TASKS, "resnet50-imagenet"})
def test_models_take_what_their_data_becomes(name: str) -> None:
    entry = TASKS[name]
    known = datasets.find_entry(entry.data)
    model = entry.build(known.classes).eval()
    images = torch.randint(0, 256, (2, *known.shape), dtype=torch.uint8)
    logits = model(entry.prepare(images, None))
    assert logits.shape == (2, known.classes)
    assert entry.loss(logits, torch.zeros(2, dtype=torch.long)).isfinite()


@pytest.mark.parametrize("name", TRANSLATIONS)
@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_translation_wants_two_texts(name: str, given: int, book: Path) -> None:
    with pytest.raises(InputError, match="--text FILE --text FILE"):
        tasks.get(name, text=[book] * given)


def test_a_translation_is_learned_and_scored(tmp_path: Path) -> None:
    for name, verb in (("en", "counts"), ("de", "zählt")):
        lines = (f"{verb} {i % 10} {i // 10}\n" for i in range(100))
        (tmp_path / name).write_text("".join(lines))
    task = tasks.get("transformer-parallel", text=[tmp_path / "en", tmp_path / "de"])
    config = Config(epochs=2, run_dir=tmp_path / "run", schedule="constant", learners=2)
    result = train(task, config, quiet=True)
    assert result.metric < 3.2  # 40 tokens, so a guess costs 3.7
    assert result.final_metrics.keys() == {"bleu"}


def test_captions_of_shapes_are_learned_and_scored(tmp_path: Path) -> None:
    config = Config(epochs=0.1, run_dir=tmp_path / "run", schedule="constant")
    result = train(tasks.get("captioner-shapes"), config, quiet=True)
    assert result.metric < 1  # 20 words, so a guess costs 3
    assert result.final_metrics.keys() == {"exact_match"}
