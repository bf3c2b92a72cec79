"""What a start comes to before the ranks meet: checked settings of trainer and recipe, and where it goes on from.

Both kinds of settings are flags and YAML keys side by side: `combined` makes one class of them. No torch is imported
before a recipe is named, so that a bare `--help` is quick.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from functional_sl.run import cli, manifest, resuming, runlog
from functional_sl.run.cli import UsageError
from functional_sl.training.config import MAY_CHANGE, UNSTORED, TrainConfig

if TYPE_CHECKING:
    from functional_sl.recipe import Builder

RECIPES = ("bc_state", "bc_visual", "nerd", "rwm", "rigidformer")  # of this package
_NO_RECIPE = (
    "no recipe: give --recipe=package.module:function, or --resume; this package has functional_sl.recipes.NAME:build "
    f"for the names {', '.join(RECIPES)}"
)


class Request(NamedTuple):
    """What a start comes to."""

    config: TrainConfig
    task: Any  # the recipe's settings
    builder: Builder
    source: Path | None  # the snapshot from which the run goes on


class CommandLine(NamedTuple):
    """What a command line says, before the settings are checked together."""

    values: dict[str, Any]  # of trainer and recipe
    given: frozenset[str]  # the names that a file or a flag set
    source: Path | None


def parse(argv: Sequence[str], program: str, description: str) -> CommandLine:
    """Reads flags over `--config` over the defaults of `--size`; prints the help and exits when it is asked for.

    Raises:
      UsageError: as `functional_sl.run.cli.parse`, and for a recipe or run that cannot be loaded.
    """
    named = _peek(argv)
    source = resuming.find(named["resume"], named.get("run_dir"), having="recipe") if named.get("resume") else None
    if source:
        named = runlog.describe(resuming.home(source))["config"] | named
    builder = _load(named["recipe"]) if named.get("recipe") else None
    kind = combined(builder, named.get("size", TrainConfig.size)) if builder else TrainConfig
    parsed = cli.parse(_unchecked(kind), argv, program=program, description=description)
    if builder is None:
        raise UsageError(_NO_RECIPE)
    return CommandLine(cli.to_dict(parsed.config), parsed.given, source)


def resolve(values: Mapping[str, Any], given: frozenset[str], source: Path | None = None) -> Request:
    """Checks the settings of a start as far as one process can.

    Args:
      values: of trainer and recipe by name; what is absent has its default. With `resume`, only `given` ones count,
        and the run's own fill the rest.
      given: the names that were set on purpose.
      source: the snapshot that `resume` means, where it is known already.

    Raises:
      UsageError: for what cannot be met or found.
    """
    for name in ("run_dir", "resume", "init_from"):
        if values.get(name) == "":
            raise UsageError(f"--{name}= names no folder; give one or leave the flag out")
    if values.get("resume"):
        if values.get("init_from"):
            raise UsageError("--resume goes on with a run and --init_from starts a new one; give one of them")
        return _resumed(
            values, given, source or resuming.find(values["resume"], values.get("run_dir"), having="recipe")
        )
    if not values.get("recipe"):
        raise UsageError(_NO_RECIPE)
    builder = _load(values["recipe"])
    whole = cli.from_dict(combined(builder, values.get("size", TrainConfig.size)), values)
    return Request(*_split(whole, builder), builder, None)


def combined(builder: Builder, size: str) -> type:
    """Returns the frozen dataclass of the trainer's and the recipe's settings, with the defaults of a size.

    Raises:
      UsageError: if the recipe has a setting of the trainer's name, or no such size.
    """
    name = builder.build.__module__
    clash = sorted(_names(TrainConfig) & _names(builder.settings))
    if clash:
        raise UsageError(f"{name}: the recipe's settings {', '.join(clash)} have names of the trainer's; rename them")
    if builder.sizes and size not in builder.sizes:
        raise UsageError(f"--size={size}: {name} has {', '.join(builder.sizes)}")
    if not builder.sizes and size != TrainConfig.size:
        raise UsageError(f"--size={size}: {name} has no sizes; leave it out")
    chosen = builder.sizes.get(size, {})
    defaults = {"recipe": None, "size": size}
    for part, source in (("train", TrainConfig), ("recipe", builder.settings)):
        preset = dict(chosen.get(part, {}))
        defaults |= {key: getattr(_preset(source, preset, f"{name}, size {size}"), key) for key in preset}
    own = list(_fields(builder.settings, defaults))
    if own and not own[0][2].metadata.get("group"):
        field, about = own[0][2], {**own[0][2].metadata, "group": name}
        own[0] = (*own[0][:2], dataclasses.field(default=field.default, metadata=about))
    fields = [*_fields(TrainConfig, defaults), *own]
    return dataclasses.make_dataclass("Settings", fields, frozen=True)


def stored(config: TrainConfig, task: Any) -> dict[str, Any]:
    """Returns all settings as a run keeps them: without the paths of one attempt. It is a `--config` file's content."""
    values = cli.to_dict(config) | cli.to_dict(task)
    return {name: value for name, value in values.items() if name not in UNSTORED}


def _resumed(values: Mapping[str, Any], given: frozenset[str], source: Path) -> Request:
    kept = runlog.describe(resuming.home(source))["config"]
    builder = _load(kept["recipe"])
    kind = combined(builder, kept["size"])
    changes = {name: values[name] for name in given if name not in UNSTORED}
    old, new = cli.from_dict(kind, kept), cli.from_dict(kind, {**kept, **changes})
    refused = [name for name in cli.differing(old, new) if name not in MAY_CHANGE | builder.places]
    if refused:
        shown = ", ".join(f"{name} {getattr(old, name)} -> {getattr(new, name)}" for name in refused)
        raise UsageError(f"a resumed run keeps its settings ({shown}); start a new run with --init_from={source}")
    done = manifest.read(source)["step"]
    # A run that is at its end may lack its pictures: without --updates they are drawn anew.
    if done > new.updates or (done == new.updates and "updates" in given):
        raise UsageError(f"--updates={new.updates}: {source} has {done} already; ask for more")
    return Request(*_split(new, builder), builder, source)


def _split(whole: Any, builder: Builder) -> tuple[TrainConfig, Any]:
    parts = []
    for kind in (TrainConfig, builder.settings):
        try:
            parts.append(kind(**{name: getattr(whole, name) for name in _names(kind)}))
        except ValueError as error:
            raise UsageError(cli.one_line(error)) from error
    return tuple(parts)


def _load(name: str) -> Builder:
    from functional_sl import recipe

    try:
        return recipe.load(name)
    except ValueError as error:
        raise UsageError(f"--recipe: {error}") from error


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind) if field.init}


def _fields(kind: type, defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.init:
            default = defaults.get(field.name, field.default)
            yield field.name, hints[field.name], dataclasses.field(default=default, metadata=field.metadata)


def _unchecked(kind: type) -> type:
    """Returns the class without checks of its own: a resume checks flags together with what its run has."""
    return dataclasses.make_dataclass("Settings", _fields(kind, {}), frozen=True)


def _preset(kind: type, values: Mapping[str, Any], where: str) -> Any:
    try:
        return cli.from_dict(_unchecked(kind), values)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _peek(argv: Sequence[str]) -> dict[str, str]:
    """Returns the texts that decide which settings there are, flags over `--config`; nothing is checked yet."""
    wanted, found = ("recipe", "size", "resume", "run_dir", "config"), {}
    for position, argument in enumerate(argv):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in wanted:
            found[name] = value if equals else "".join(argv[position + 1 : position + 2])
    return {name: text for name, text in (_peek_file(found.get("config")) | found).items() if name in wanted}


def _peek_file(path: str | None) -> dict[str, str]:
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8-sig"), yaml.BaseLoader) if path else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        content = {}  # the parser tells what is wrong with it
    mapping = content if isinstance(content, dict) else {}
    return {name: text for name, text in mapping.items() if isinstance(text, str) and text not in ("", "null")}
