"""`python -m functional_sl.export SNAPSHOT OUT`: turns a snapshot into a portable bundle.

The recipe is built anew with the settings that the snapshot holds, and tells what a third party needs; the files that
are written need neither.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from functional_sl.run import cli, identity, manifest, resuming
from functional_sl.run.runlog import RunError

PROGRAM = "python -m functional_sl.export"
DESCRIPTION = (
    "Writes the model of a snapshot as OUT.safetensors, which predicts without the code that trained it, OUT.pt2 (a "
    "torch.export program) and OUT.onnx, each checked. SNAPSHOT is a snapshot, a run or 'latest'. The last line on "
    "stdout is one JSON object."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    snapshot: str | None = cli.option(None, "Folder of a snapshot, or of a run (its newest), or 'latest' or 'best'.")
    out: str | None = cli.option(None, "The files' name without its suffix.")
    formats: str = cli.option("safetensors,pt2", "Any of safetensors, pt2 and onnx (the extra `onnx`), by commas.")
    data: str | None = cli.option(None, "Where the recipe's data lie now, as setting=path, if they were moved.")


def export(
    snapshot: str | os.PathLike[str],
    out: str | os.PathLike[str],
    formats: Sequence[str] = ("safetensors",),
    places: Mapping[str, str] | None = None,
) -> dict[Path, Any]:
    """Writes the bundle of a snapshot of either layout, and returns how closely each file repeats it.

    Args:
      snapshot: folder of a snapshot or of a run, whose latest one is taken, or `latest`.
      out: the files' common name.
      formats: as `functional_sl.programs.write`.
      places: settings of the recipe that say where its data lie now, by name.

    Raises:
      UsageError: for a snapshot of another kind, a recipe that cannot be loaded or makes no bundle, or data whose
        schema is another than in training.
      RunError, SnapshotError, BundleError: for files that cannot be read or written.
    """
    from functional_sl import programs

    return programs.write(bundle_of(resuming.folder(snapshot, having="recipe"), places), out, formats)


def bundle_of(source: Path, places: Mapping[str, str] | None = None) -> Any:
    """Returns the `Bundle` of a snapshot's folder, with run, update and versions among what it says of itself.

    Args:
      source: the folder.
      places: as `export`.

    Raises:
      UsageError, SnapshotError: as `export`.
    """
    from functional_sl import keys
    from functional_sl.training import recovery, request

    content, places = manifest.read(source), places or {}
    if "layout" not in content["extra"]:
        raise cli.UsageError(f"{source}: is no snapshot of a supervised run")
    asked = request.resolve({**content["config"], **places}, frozenset())
    if odd := sorted(places.keys() - asked.builder.places):
        known = ", ".join(sorted(asked.builder.places)) or "none"
        raise cli.UsageError(f"--data={odd[0]}=...: {asked.config.recipe} has data at the settings {known}")
    recipe = asked.builder.build(asked.task)
    if recipe.bundle is None:
        raise cli.UsageError(f"{asked.config.recipe}: the recipe makes no bundle")
    if identity.digest(dict(recipe.schema), "schema") != content["extra"]["schema"]:
        raise cli.UsageError(
            f"{source}: the recipe's schema is another one than in training; set data and versions back"
        )
    bundle = recipe.bundle(*recovery.model(source, *recipe.init(keys.key(0))))
    trained = {
        "run_id": content["run_id"],
        "updates": content["step"],
        "score": content["score"],
        "config_digest": content["config_digest"],
        "schema_digest": content["extra"]["schema"],
        "versions": content["versions"],
    }
    return bundle._replace(about={**bundle.about, "trained": trained})


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the files and prints one JSON line; exits with 2 for what cannot be exported."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for i, name in enumerate(("snapshot", "out")):
        if i < len(arguments) and not arguments[i].startswith("-"):
            arguments[i] = f"--{name}={arguments[i]}"
    with cli.exit_on_usage_error(PROGRAM):
        settings = cli.parse(Settings, arguments, program=PROGRAM, description=DESCRIPTION).config
        if settings.snapshot is None or settings.out is None:
            raise cli.UsageError("give a snapshot and the name of the files to write: SNAPSHOT OUT")
        try:
            setting, _, place = (settings.data or "").partition("=")
            formats = [name.strip() for name in settings.formats.split(",")]
            files = export(settings.snapshot, settings.out, formats, {setting: place} if setting else {})
        except (RunError, manifest.SnapshotError, ValueError, OSError) as error:
            raise cli.UsageError(str(error)) from error
    found = {str(path): {"difference": x.difference, "bit_equal": x.bit_equal} for path, x in files.items()}
    print(json.dumps({"snapshot": settings.snapshot, "files": found}))


if __name__ == "__main__":
    main()
