"""Frozen dataclass <-> flags <-> YAML, with nothing global.

A command's options are the fields of one frozen dataclass. `parse` builds it from four layers, each of
which overrides the one before: defaults, `--preset`, `--config`, flags. The same text means the same value
in a flag and in a YAML file. Every mistake is a `UsageError` of one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import difflib
import math
import os
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from absl import flags

from functional_sl.run import identity

Config = TypeVar("Config")


class UsageError(ValueError):
    """A mistake in a flag, a preset or a configuration file, told in one line."""


class Parsed(NamedTuple):
    """What a command line says."""

    config: Any  # an instance of the config class
    given: frozenset[str]  # the fields that a preset, a file or a flag named, even if with their default


class _Option(NamedTuple):
    name: str
    base: type  # bool, int, float or str
    many: bool
    optional: bool
    default: Any
    help: str
    choices: tuple[Any, ...]
    unit: str
    group: str


def option(default: Any, help: str, *, choices: Sequence[Any] = (), unit: str = "", group: str = "") -> Any:
    """Returns a dataclass field with what the command line needs to know about it.

    Args:
      default: the value without a preset, a file or a flag.
      help: one or two sentences for `--help`.
      choices: the only values that are accepted; empty for any.
      unit: the unit of the value, such as `s`.
      group: a heading of `--help`, given at the first field under it.
    """
    metadata = {"help": help, "choices": tuple(choices), "unit": unit, "group": group}
    return dataclasses.field(default=default, metadata=metadata)


def parse(
    config_class: type[Config],
    argv: Sequence[str] | None = None,
    *,
    program: str,
    description: str = "",
    presets: Mapping[str, Mapping[str, object]] | None = None,
    default_preset: str | Callable[[Mapping[str, Any]], str] | None = None,
) -> Parsed:
    """Builds a config from default < `--preset=NAME` < `--config=PATH.yaml` < flags.

    Prints the help and exits with 0 when `--help` is there.

    Args:
      config_class: a frozen dataclass whose fields are bool, int, float, str, tuple[int, ...],
        tuple[float, ...] or one of these or None.
      argv: the arguments after the program's name; `sys.argv[1:]` by default.
      program: the command's name in the help.
      description: a sentence or two under the usage line of the help.
      presets: field values by preset name.
      default_preset: the preset without `--preset`, or a function that chooses it by the values that a file and flags
        gave; the fields that it names do not count as given.

    Raises:
      UsageError: an unknown name, a wrong value, a flag given twice, a file that cannot be read, or a
        ValueError of the dataclass's own checks.
    """
    presets = presets or {}
    options = _options(config_class)
    general = _general(presets)
    known = {**general, **options}
    if len(known) < len(general) + len(options):
        raise TypeError(f"{config_class.__name__}: a field has the name of another flag; rename it: {list(known)}")
    texts = _tokenize(known, sys.argv[1:] if argv is None else argv)
    flagged = {name: _convert(known[name], text, f"--{name}") for name, text in texts.items()}

    def preset(name: str) -> dict[str, Any]:
        return _convert_all(options, presets[name].items(), f"preset {name}: ")

    asked = _read_yaml(options, general, flagged["config"]) if "config" in flagged else {}
    asked |= {name: value for name, value in flagged.items() if name in options}
    default = default_preset(asked) if callable(default_preset) else default_preset
    layers = (preset(flagged["preset"]) if "preset" in flagged else {}) | asked
    fallback = preset(default) if default and "preset" not in flagged else {}
    if flagged.get("help"):
        emit(sys.stdout, _help(program, description, _general(presets, default), options, fallback | layers))
        raise SystemExit(0)
    return Parsed(_build(config_class, fallback | layers), frozenset(layers))


@contextlib.contextmanager
def exit_on_usage_error(program: str) -> Iterator[None]:
    """Turns a `UsageError` into the one line `program: message` on stderr and exit code 2, Ctrl-C likewise into 130."""
    try:
        yield
    except UsageError as error:
        emit(sys.stderr, f"{program}: {one_line(error)}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        emit(sys.stderr, f"{program}: interrupted\n")
        raise SystemExit(130) from None


def to_dict(config: Any) -> dict[str, Any]:
    """Returns the fields as plain JSON values (tuples become lists), checked against their types."""
    options = _options(type(config))
    values = {name: _convert(o, getattr(config, name), name) for name, o in options.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_dict(config_class: type[Config], mapping: Mapping[str, object]) -> Config:
    """Builds a config from the dict of `to_dict`; absent fields keep their defaults.

    Raises:
      UsageError: for an unknown key (with the nearest name), a wrong type or a value out of its choices.
    """
    return _build(config_class, _convert_all(_options(config_class), mapping.items(), ""))


def digest(config: Any) -> str:
    """Returns the SHA-256 of the config's canonical JSON, in hexadecimal: equal configs, equal digests."""
    return identity.digest(to_dict(config))


def differing(a: Any, b: Any) -> tuple[str, ...]:
    """Returns the names of the fields in which two configs of one class differ, in field order."""
    left, right = to_dict(a), to_dict(b)
    return tuple(name for name in left if left[name] != right[name])


def _options(config_class: type) -> dict[str, _Option]:
    hints = typing.get_type_hints(config_class)
    return {f.name: _option_of(f, hints[f.name]) for f in dataclasses.fields(config_class) if f.init}


def _option_of(field: dataclasses.Field[Any], hint: Any) -> _Option:
    inner = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(hint) if a is not types.NoneType]
    many = len(inner) == 1 and typing.get_origin(inner[0]) is tuple and typing.get_args(inner[0])[1:] == (...,)
    base = typing.get_args(inner[0])[0] if many else inner[0]
    if len(inner) != 1 or base not in ((int, float) if many else (bool, int, float, str)):
        raise TypeError(f"{field.name}: a flag cannot hold {hint}; use bool, int, float, str or a tuple of numbers")
    if field.default is dataclasses.MISSING:
        raise TypeError(f"{field.name}: an option needs a default that is a plain value")
    about = {"help": "", "choices": (), "unit": "", "group": "", **field.metadata}
    return _Option(field.name, base, many, inner != [hint], field.default, **about)


def _general(presets: Mapping[str, object], default: str | None = None) -> dict[str, _Option]:
    def about(name: str, base: type, help: str, choices: tuple[str, ...] = ()) -> _Option:
        return _Option(name, base, False, False, None, help, choices, "", "")

    found = [about("help", bool, "Show this text."), about("config", str, "YAML file of options.")]
    if presets:
        text = "Named set of options." + (f" Default: {default}." if default else "")
        found.append(about("preset", str, text, tuple(presets)))
    return {o.name: o for o in found}


def _tokenize(options: Mapping[str, _Option], argv: Sequence[str]) -> dict[str, str]:
    """Returns the text of every flag that is in `argv`; absl splits, `_convert` gives the meaning."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    for o in options.values():
        short = "h" if o.name == "help" else None
        flag = flags.Flag(flags.ArgumentParser(), None, o.name, None, o.help, short, boolean=o.base is bool)
        flags.DEFINE_flag(flag, values)
    spellings = list(options) + [f"no{o.name}" for o in options.values() if o.base is bool]
    # absl acts on these two itself: one would hide misspelt flags, the other would read flags from a file.
    for builtin in ("undefok", "flagfile"):
        if any(a.partition("=")[0].lstrip("-") == builtin and a.startswith("-") for a in argv):
            raise _unknown("unknown flag --", builtin, spellings, "--")
    try:
        rest = values(["", *argv])[1:]
    except flags.UnrecognizedFlagError as error:
        raise _unknown("unknown flag --", error.flagname, spellings, "--") from None
    except (flags.Error, ValueError) as error:
        raise UsageError(one_line(error)) from None
    if rest:
        hint = "; a boolean takes its value after =" if rest[0] in ("true", "false") else ""
        raise UsageError(f"unexpected argument {rest[0]!r}; options are spelled --name=value{hint}")
    for name in options:
        if values[name].present > 1:
            raise UsageError(f"--{name} is given {values[name].present} times; give it once")
    return {name: values[name].value for name in options if values[name].present}


def _unknown(what: str, name: str, known: Iterable[str], prefix: str = "") -> UsageError:
    near = difflib.get_close_matches(name, list(known), 1)
    return UsageError(f"{what}{name}; " + (f"did you mean {prefix}{near[0]}?" if near else "see --help for the names"))


def _convert_all(options: Mapping[str, _Option], items: Iterable[tuple[str, object]], where: str) -> dict[str, Any]:
    values = {}
    for name, raw in items:
        if name not in options:
            raise _unknown(f"{where}unknown key ", str(name), options)
        values[name] = _convert(options[name], raw, where + name)
    return values


def _convert(o: _Option, raw: object, where: str) -> Any:
    """Returns `raw`, a text or a typed value, as the option's type."""
    if o.optional and (raw is None or (isinstance(raw, str) and raw.strip().lower() in ("none", "null"))):
        return None
    try:
        if o.many:
            items = [x for x in raw.split(",") if raw.strip()] if isinstance(raw, str) else raw
            if not isinstance(items, (list, tuple)):
                raise ValueError
            value = tuple(_scalar(o.base, x) for x in items)
        else:
            value = _scalar(o.base, raw)
    except (ValueError, ArithmeticError):
        raise UsageError(f"{where}: expected {_expectation(o)}; got {raw!r:.200}") from None
    for item in value if o.many else (value,):
        if o.choices and item not in o.choices:
            near = difflib.get_close_matches(str(item), [str(c) for c in o.choices], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{where}: expected one of {', '.join(map(str, o.choices))}; got {item!r:.200}{hint}")
    return value


def _scalar(base: type, raw: object) -> Any:
    if base is str and isinstance(raw, str):
        return raw
    if base is bool and str(raw).strip().lower() in ("true", "false"):
        return str(raw).strip().lower() == "true"
    if base in (int, float) and isinstance(raw, (int, float, str)) and not isinstance(raw, bool):
        return _integer(raw) if base is int else _finite(raw)
    raise ValueError


def _integer(raw: int | float | str) -> int:
    number = decimal.Decimal(raw)
    if not abs(number) < 2**63 or number != number.to_integral_value():
        raise ValueError
    return int(number)


def _finite(raw: int | float | str) -> float:
    number = float(raw)
    if not math.isfinite(number):
        raise ValueError
    return number


def _expectation(o: _Option) -> str:
    one = {bool: "true or false", int: "a 64-bit integer", float: "a finite number", str: "text"}[o.base]
    many = {int: "integers separated by commas", float: "finite numbers separated by commas"}
    return (many[o.base] if o.many else one) + (" or none" if o.optional else "")


def _read_yaml(options: Mapping[str, _Option], flags_alone: Collection[str], path: str) -> dict[str, Any]:
    """Returns the values in a YAML file; scalars stay text up to `_convert`, so 1e-3 is the number it looks like."""
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8-sig"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UsageError(f"cannot read {os.fspath(path)!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise UsageError(f"{os.fspath(path)} is no YAML file: {one_line(error)}") from None
    except RecursionError:
        raise UsageError(f"{os.fspath(path)}: lists within lists; expected lines of `name: value`") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{os.fspath(path)}: expected lines of `name: value`")
    values: dict[str, Any] = {}
    for key, node in root.value if root else ():
        where = f"{os.fspath(path)} line {key.start_mark.line + 1}: "
        if str(key.value) in values:
            raise UsageError(f"{where}{key.value} is given twice")
        if str(key.value) in flags_alone:
            raise UsageError(f"{where}{key.value} is no key of a file; give --{key.value} as a flag instead")
        try:
            values |= _convert_all(options, [(str(key.value), _plain(node))], where)
        except RecursionError:
            raise UsageError(f"{where}{key.value}: a list that holds itself; expected `name: value`") from None
    return values


def _plain(node: yaml.Node) -> object:
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(value) for key, value in node.value}
    return None if node.style is None and node.value in ("", "~", "null") else node.value


def _build(config_class: type[Config], values: Mapping[str, Any]) -> Config:
    try:
        return config_class(**values)
    except ValueError as error:
        raise UsageError(one_line(error)) from None


def one_line(error: BaseException) -> str:
    """Returns what an error says, in one line."""
    return " ".join(str(error).split())


def _help(
    program: str,
    description: str,
    general: Mapping[str, _Option],
    options: Mapping[str, _Option],
    values: Mapping[str, Any],
) -> str:
    width = max(20, min(100, shutil.get_terminal_size().columns) - 1)
    lines = textwrap.wrap(f"usage: {program} [--name=value ...]", width, subsequent_indent="  ")
    if description:
        lines += ["", *textwrap.wrap(description, width)]
    lines.append("")
    for o in (*general.values(), *options.values()):
        if o.group:
            lines += ["", *textwrap.wrap(f"{o.group}:", width)]
        shown = "" if o.name in general else f"default: {_text(values.get(o.name, o.default))}"
        about = ", ".join(filter(None, (o.unit, shown)))
        head = _spelling(o) + (f" ({about})" if about else "")
        lines += textwrap.wrap(head, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        lines += textwrap.wrap(o.help, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _spelling(o: _Option) -> str:
    if o.name in ("help", "config"):
        return {"help": "--help", "config": "--config=PATH"}[o.name]
    if o.base is bool and not o.optional:
        return f"--[no]{o.name}"
    kind = "|".join(map(str, o.choices)) or ("true|false" if o.base is bool else o.base.__name__.upper())
    return f"--{o.name}={kind}{f',{kind},...' if o.many else ''}{'|none' if o.optional else ''}"


def _text(value: object) -> str:
    """Returns a value as a flag would spell it."""
    if isinstance(value, tuple):
        return ",".join(map(_text, value)) or "empty"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "empty"


def emit(stream: Any, text: str) -> None:
    """Writes `text` whatever the stream's encoding; a closed pipe or a full disk is not a second error."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError:
        # The interpreter flushes once more at exit and would complain then.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
