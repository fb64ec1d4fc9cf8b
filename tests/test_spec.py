import pytest

from crossbow.errors import InputError
from crossbow.spec import Value, parse_spec


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("false", False),
        ("3", 3),
        ("-3", -3),
        ("0.5", 0.5),
        ("1e-4", 1e-4),
        ("82/123", (82.0, 123.0)),
        ("0.9/0.95/1", (0.9, 0.95, 1.0)),
        ("fused", "fused"),
        ("data/cifar", "data/cifar"),
        ("1/two", "1/two"),
        ("a=b", "a=b"),
    ],
)
def test_a_value_has_the_narrowest_type(text: str, value: Value) -> None:
    name, options = parse_spec(f"sgd:key={text}")
    assert name == "sgd"
    assert options == {"key": value}
    assert type(options["key"]) is type(value)


def test_nan_and_infinity_are_numbers_for_the_reader_to_refuse() -> None:
    _, options = parse_spec("sgd:momentum=nan,weight_decay=-inf")
    assert all(isinstance(value, float) for value in options.values())


def test_options_keep_their_order_and_spaces_do_not_matter() -> None:
    name, options = parse_spec(" local-sgd : period = 4 , alpha=0.5 ")
    assert name == "local-sgd"
    assert list(options.items()) == [("period", 4), ("alpha", 0.5)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        (":lr=1", "''"),
        ("momentum=0.9", "'momentum=0.9'"),
        ("sgd momentum", "'sgd momentum'"),
        ("sgd:", "''"),
        ("sgd:momentum", "'momentum'"),
        ("sgd:momentum=", "'momentum='"),
        ("sgd:=0.9", "'=0.9'"),
        ("sgd:0.9=1", "'0.9=1'"),
        ("sgd:momentum=0.9,", "''"),
        ("sgd:momentum=0.9,momentum=0.8", "'momentum' is given twice"),
    ],
)
def test_malformed_specs_are_named_in_one_line(text: str, named: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_spec(text)
    message = str(raised.value)
    assert repr(text) in message
    assert named in message
    assert "key=value" in message
    assert "\n" not in message
