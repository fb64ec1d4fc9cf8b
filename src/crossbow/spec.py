"""Specs: a name and its options in one word of a command line, `sgd:momentum=0.9,nesterov=true`.

    spec   = name [":" option {"," option}]
    option = key "=" value
    value  = true | false | integer | number | number {"/" number} | text

This is the form only: whoever takes a spec says which names, options and ranges are legal.
"""

from crossbow.errors import InputError

Value = bool | int | float | str | tuple[float, ...]
Options = dict[str, Value]

_BOOLEANS = {"true": True, "false": False}


def parse_spec(text: str) -> tuple[str, Options]:
    """Split a spec into its name and its options.

    >>> parse_spec("sgd:momentum=0.9,nesterov=true")
    ('sgd', {'momentum': 0.9, 'nesterov': True})
    >>> parse_spec("adamw:betas=0.9/0.95,warmup=5")
    ('adamw', {'betas': (0.9, 0.95), 'warmup': 5})
    >>> parse_spec("constant")
    ('constant', {})
    """
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not _is_name(name):
        raise _malformed(text, f"{name!r} is no name")
    options: Options = {}
    for option in rest.split(",") if colon else ():
        key, value = _parse_option(text, option)
        if key in options:
            raise _malformed(text, f"{key!r} is given twice")
        options[key] = value
    return name, options


def _parse_option(text: str, option: str) -> tuple[str, Value]:
    key, equals, value = (part.strip() for part in option.partition("="))
    if not equals or not value or not key.isidentifier():
        raise _malformed(text, f"{option!r} is no key=value")
    return key, _parse_value(value)


def _parse_value(text: str) -> Value:
    """Read a value as the narrowest of its types."""
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    try:
        return _parse_numbers(text)
    except ValueError:
        return text


def _parse_numbers(text: str) -> Value:
    if "/" in text:
        return tuple(float(part) for part in text.split("/"))
    try:
        return int(text)
    except ValueError:
        return float(text)


def _is_name(text: str) -> bool:
    return text.replace("-", "_").isidentifier()


def _malformed(text: str, reason: str) -> InputError:
    form = "write name or name:key=value,key=value, a list as 1/2/3"
    return InputError(f"malformed spec {text!r}: {reason} ({form})")
