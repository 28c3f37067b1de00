"""`tierckpt import` and `tierckpt export`: the checkpoints of other tools."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt import _faults
from tierckpt._text import counted, size_text
from tierckpt.errors import ConfigError, TierckptError
from tierckpt.storage import durable

from .arguments import PLACES, check_places, nbytes, number, place, version_number
from .output import steps_after

if TYPE_CHECKING:
    from rich.console import Console

    from tierckpt.interchange.formats import Format
    from tierckpt.interchange.importing import Imported

__all__ = ["export_version", "import_checkpoint"]


FORMATS = ("safetensors", "transformers", "dcp", "lightning", "torch", "horovod")
"""As in `interchange.formats`, which imports torch."""


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt import SOURCE PATH`."""
    parser.description = (
        "SOURCE is a file of torch.save (also of Horovod's examples), a folder of "
        "torch.distributed.checkpoint, safetensors (a file, or a folder with an index), a .ckpt "
        "of Lightning, or a folder checkpoint-N of Hugging Face's Trainer. No code in it runs. "
        "PATH is a job's path, or its persistent_path; restore() of the job, on any number of "
        "ranks, takes the version. It is written as a whole, verified, and reported."
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("path", type=place, metavar="PATH")
    text = "format of SOURCE; default: as recognized"
    parser.add_argument("--format", choices=FORMATS, help=text)
    text = "name of the model in the file of a script; default: the usual names"
    parser.add_argument("--model", metavar="KEY", help=text)
    text = "drop this start of names in the model ('net.'), and tensors without it"
    parser.add_argument("--prefix", metavar="TEXT", help=text)
    text = "the iteration to resume from; default: as in SOURCE, or the number of optimizer steps"
    parser.add_argument("--iteration", type=number, metavar="N", help=text)
    text = "PATH is a directory used as persistent_path (a URL always is)"
    parser.add_argument("--persistent", action="store_true", help=text)
    text = "also if there are checkpoints: a restart takes the new one then"
    parser.add_argument("--force", action="store_true", help=text)
    parser.set_defaults(run=import_checkpoint)


def import_checkpoint(args: argparse.Namespace, console: Console) -> None:
    """Write a version from another tool's checkpoint, and report its parts."""
    _check_source(args.source)
    from tierckpt.interchange.formats import Options, format_of_source
    from tierckpt.interchange.importing import import_state

    source: Path = args.source
    kind = format_of_source(source, args.format)
    foreign = kind.read(source, Options(model_key=args.model))
    if args.prefix:
        foreign.strip(args.prefix)
    made = import_state(
        foreign,
        args.path,
        persistent=args.persistent,
        iteration=args.iteration,
        force=args.force,
    )
    at = f"v{made.facts.id.version}, iteration {made.facts.iteration}"
    size = size_text(made.nbytes)
    console.print(f"{args.path}: {at}, on {made.level}, {size}, verified", soft_wrap=True)
    console.print(f"from {source}, {foreign.kind}", soft_wrap=True)
    for text in _report(made):
        console.print(f"  {text}", soft_wrap=True)


def _check_source(source: Path) -> None:
    """Raise ConfigError for a source without content, before the seconds that torch takes."""
    if not source.exists():
        raise ConfigError(f"{source} does not exist")
    if not os.access(source, os.R_OK):
        raise ConfigError(f"{source} cannot be read: its rights do not allow it")
    if source.is_file() and not source.stat().st_size:
        raise ConfigError(f"{source} is empty")


def _report(made: Imported) -> Iterator[str]:
    foreign = made.foreign
    yield f"model: {counted(len(foreign.model), 'tensor')}"
    for label, state in foreign.optimizers.items():
        with_state, groups = len(state["state"]), len(state["param_groups"])
        text = f"state of {counted(with_state, 'parameter')}, {counted(groups, 'group')}"
        yield f"optimizer {label!r}: {text}"
    if foreign.extra:
        yield f"objects, for extra=: {', '.join(foreign.extra)}"
    if foreign.values:
        yield f"values, for an elastic state: {', '.join(foreign.values)}"
    if not foreign.optimizers:
        yield "no optimizer: it starts fresh"
    if not made.iteration_known:
        counted_by = "the number of optimizer steps" if foreign.count_steps() else "0"
        yield f"no iteration: it is {counted_by}; --iteration N sets another"
    yield "no random streams, no place in the data: they start fresh"
    for text in foreign.not_taken:
        yield f"not taken: {text}"


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tierckpt export PATH... TARGET`."""
    parser.description = (
        "TARGET's name chooses the format: .safetensors for the model alone, .pt or "
        ".pth for everything as torch.save writes it (model, optimizer, or optimizers by name, "
        "extra, version, iteration, metric), .ckpt for Lightning, .pth.tar as in Horovod's "
        "examples. --format chooses dcp (a folder), transformers (a folder checkpoint-N), or "
        "safetensors in a folder. The default is the version that a restart takes. It is verified. "
        f"In Python: tierckpt.load(PATH). {PLACES}"
    )
    parser.add_argument("path", type=place, nargs="+", metavar="PATH")
    parser.add_argument("out", type=Path, metavar="TARGET")
    text = (
        "format of TARGET; default: by its name. files: a folder with the routed files of all ranks"
    )
    parser.add_argument("--format", choices=(*FORMATS, "files"), help=text)
    parser.add_argument(
        "--version",
        type=version_number,
        metavar="V",
        help="export version V; default: the one that a restart takes",
    )
    text = "limit of one file of weights, e.g. 5G, in a folder of safetensors (default: 5 GB)"
    parser.add_argument("--max-shard-bytes", type=nbytes, metavar="SIZE", help=text)
    text = "put this before names in the model, e.g. 'net.', the attribute of a LightningModule"
    parser.add_argument("--prefix", metavar="TEXT", help=text)
    parser.add_argument("--force", action="store_true", help="replace TARGET if it exists")
    text = (
        "a module with classes of stored values (torchao's 8-bit state, an Enum); may be repeated"
    )
    parser.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE", help=text
    )
    parser.set_defaults(run=export_version)


def export_version(args: argparse.Namespace, console: Console) -> None:
    """Write one version for another tool. The target appears when it is complete."""
    out: Path = args.out
    check_places(args.path)
    if args.format == "files":
        _export_files(args, console)
        return
    target = Target(out, args.force, lambda at: _kind_of_target(args).recognizes(at))
    from tierckpt.interchange.formats import Options
    from tierckpt.offline.leaves import import_named
    from tierckpt.offline.stored_version import load_and_survey

    kind = _kind_of_target(args)
    import_named(args.modules)
    few = kind.model_only  # a format of models has no values of other classes
    saved, there = load_and_survey(args.path, args.version, model_only=few, as_parts=few)
    if args.prefix:
        saved.model = {f"{args.prefix}{name}": value for name, value in saved.model.items()}
    options = Options(max_shard_bytes=args.max_shard_bytes)
    # Before the target is filled: it may take the place of the current folder.
    beyond = [*steps_after(there)] if args.version is None else []
    notices = target.fill(lambda place: kind.write(saved, place, options))
    for text in saved.rejected:
        console.print(f"skipped: {text}", soft_wrap=True)
    levels = " and ".join(saved.levels)
    nbytes = size_text(target.nbytes)
    console.print(f"{out}: v{saved.version}, from {levels}, {nbytes}", soft_wrap=True)
    if saved.suspect:
        text = "is suspect: replicas differed when it was taken, so it may be the state of no rank"
        console.print(f"v{saved.version} {text}. {saved.suspect}", soft_wrap=True, markup=False)
    for text in (*notices, *beyond):
        console.print(text, soft_wrap=True)
    if saved.unseen and args.version is None:
        raise ConfigError(
            f"not all places could be read: there may be a version after v{saved.version}"
        )


def _kind_of_target(args: argparse.Namespace) -> Format:
    from tierckpt.interchange.formats import format_of_target  # imports torch

    return format_of_target(args.out, args.format)


def _export_files(args: argparse.Namespace, console: Console) -> None:
    """Write the routed files of all ranks into a folder."""
    from tierckpt.interchange import formats
    from tierckpt.offline.stored_version import open_version

    target = Target(args.out, args.force, formats.recognizes_routed_files)
    counts: list[int] = []
    place = args.path[0] if len(args.path) == 1 else args.path
    with contextlib.closing(open_version(place, args.version, lambda nbytes: None)) as version:

        def write(folder: Path) -> list[str]:
            counts.append(formats.write_routed_files(version, folder))
            return []

        target.fill(write, keep_rights=True)
        what = counted(counts[0], "file")
        text = f"{args.out}: {what}, {size_text(target.nbytes)}, of {version.text()}"
        console.print(text, soft_wrap=True)


class Target:
    """A file or folder to write. It is made under a temporary name beside it, and renamed."""

    def __init__(self, out: Path, force: bool, recognizes: Callable[[Path], bool]) -> None:
        """`force`: replace what is there; a folder only if it is empty, or if `recognizes` says
        that it is a checkpoint. Raises ConfigError if something is there that stays, or if its
        folder does not exist."""
        if os.path.lexists(out) and not force:
            raise ConfigError(f"{out} exists; --force replaces it")
        if out.is_dir() and any(out.iterdir()) and not recognizes(out):
            raise ConfigError(
                f"{out} is a folder with other things than a checkpoint of this format, and is not "
                "replaced; give another name"
            )
        if not out.parent.is_dir():
            text = f"{out} cannot be written: the directory {out.parent} does not exist"
            raise ConfigError(text)
        self._out = out = out if out.name else out.absolute()  # "."
        self._temp = out.with_name(f".{out.name}.{os.getpid()}{out.suffix}")

    def fill(self, write: Callable[[Path], list[str]], keep_rights: bool = False) -> list[str]:
        """Have `write` make the file or folder, and give it the name. Returns the result of
        `write`. `keep_rights`: the access rights are those that `write` gave. Raises ConfigError if
        it cannot be written; nothing is left then."""
        out, temp = self._out, self._temp
        try:
            remarks = write(temp)
            _make_durable(temp, keep_rights)
            _faults.point("target", op="rename")
            self._replace()
        except TierckptError:
            raise
        except Exception as error:  # torch and safetensors raise their own errors for a full disk
            raise ConfigError(f"{out} cannot be written: {error}") from error
        finally:
            _remove(temp)
        return remarks

    def _replace(self) -> None:
        """Give the new one its name. A folder cannot replace another one in one step: the old one
        is moved away first."""
        out, temp = self._out, self._temp
        old = out.with_name(f".{out.name}.{os.getpid()}.old")
        if os.path.lexists(out) and (out.is_dir() or temp.is_dir()):
            out.rename(old)
        try:
            temp.replace(out)
        except OSError:
            if os.path.lexists(old):
                old.rename(out)
            raise
        durable.sync(out.parent)
        _remove(old)

    @property
    def nbytes(self) -> int:
        """Size of the file, or of all files in the folder."""
        return sum(file.stat().st_size for file in _files_in(self._out))


def _files_in(path: Path) -> list[Path]:
    return [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]


def _make_durable(path: Path, keep_rights: bool) -> None:
    """Sync all files, and give them the access rights of any new file here, unless they keep their
    own: safetensors makes private ones."""
    probe = path.with_name(f"{path.name}.rights")
    probe.touch()
    rights = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in _files_in(path):
        with file.open("rb") as opened:
            if not keep_rights:
                os.fchmod(opened.fileno(), rights)
            os.fsync(opened.fileno())


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
