"""Parts of a version: which parts a script wants, and under which names. Pure.

A pattern is a name with at most one `*`, which stands for any text, dots included; the text is
carried over to the `*` of the other side: `backbone.*` to `encoder.*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PARTS = ("model", "optimizer", "extra")
"""`model`: parameters, buffers and own states of modules. `optimizer`: state and options. `extra`:
the objects in `extra` and `extra_per_rank`, without those that are the job's own place: loaders,
samplers, counts of a loop."""


@dataclass(frozen=True)
class Selection:
    """A choice of parts, and new names for tensors of the model."""

    parts: tuple[str, ...] = PARTS
    renamed: tuple[tuple[str, str], ...] = ()
    """Patterns of the source's names with those of the live model; the first that fits counts. A
    name that fits none stays."""

    @staticmethod
    def of(only: str | Iterable[str] | None, map: Mapping[str, str] | None) -> Selection | None:
        """The selection that a script's arguments describe; None for a whole version. Raises
        ValueError, with the argument's name, for parts and patterns that do not exist."""
        if only is None and not map:
            return None
        given = PARTS if only is None else (only,) if isinstance(only, str) else tuple(only)
        unknown = [each for each in given if each not in PARTS]
        if unknown or not given:
            what = repr(unknown[0]) if unknown else "empty"
            there = ", ".join(repr(each) for each in PARTS)
            raise ValueError(f"only= is {what}; the parts are {there}")
        pairs = tuple((map or {}).items())
        for source, target in pairs:
            for text in (source, target):
                if not text or text.count("*") > 1:
                    raise ValueError(f"map= has {text!r}; give a name with at most one *")
            if "*" in target and "*" not in source:
                raise ValueError(
                    f"map= leads {source!r} to {target!r}: a * in the new name needs one in the old"
                )
        if pairs and "model" not in given:
            raise ValueError(f'map= names tensors of the model; add "model" to only={only!r}')
        return Selection(tuple(each for each in PARTS if each in given), pairs)

    def target(self, name: str) -> str:
        """The name in the live model of a tensor of the source."""
        for source, target in self.renamed:
            if (text := matched(source, name)) is not None:
                return target.replace("*", text)
        return name

    def idle(self, names: Iterable[str]) -> list[str]:
        """Patterns that fit none of the source's names."""
        there = list(names)
        return [s for s, _ in self.renamed if all(matched(s, each) is None for each in there)]


def matched(pattern: str, name: str) -> str | None:
    """The text that the `*` of a pattern stands for (empty without one); None if the name does not
    fit."""
    before, star, after = pattern.partition("*")
    if not star:
        return "" if pattern == name else None
    long_enough = len(name) >= len(before) + len(after)
    if long_enough and name.startswith(before) and name.endswith(after):
        return name[len(before) : len(name) - len(after)]
    return None


@dataclass
class PartReport:
    """What became of each tensor of a version of which parts were loaded, and of the live state.
    Names are those of the model, without `model/` or `buffer/`; other entries have their prefix."""

    source: str = ""
    """The version, `PATH@v40`."""
    parts: tuple[str, ...] = ()
    loaded: list[str] = field(default_factory=list)
    """Live names that have the source's values now."""
    skipped: list[str] = field(default_factory=list)
    """Names in the source that the live state does not have."""
    missing: list[str] = field(default_factory=list)
    """Live names that the source does not have: they keep their values."""
    other_shape: list[str] = field(default_factory=list)
    """Sentences about tensors of another shape or type, which keep their values; each has both."""
    kept: list[str] = field(default_factory=list)
    """Live objects of `extra` that keep their values, and no difference: the job's own place in its
    data and in its loop."""
    other: list[str] = field(default_factory=list)
    """Sentences about anything else that could not be taken: an optimizer of another class, a
    pattern that fits nothing."""

    @property
    def of_parts(self) -> str:
        """The parts, in words."""
        return " and ".join(self.parts)

    @property
    def differences(self) -> list[str]:
        """A sentence for everything that does not match; empty if all does."""
        found = [f"{name} is in the source, not here" for name in self.skipped]
        found += [f"{name} is here, not in the source" for name in self.missing]
        return [*self.other_shape, *found, *self.other]

    def __str__(self) -> str:
        counts = (
            (len(self.loaded), "loaded"),
            (len(self.skipped), "skipped"),
            (len(self.missing), "missing"),
            (len(self.other_shape), "of another shape or type"),
        )
        text = ", ".join(f"{number} {what}" for number, what in counts)
        kept = [f"this job's own place stays: {', '.join(self.kept)}"] if self.kept else []
        return "; ".join([f"{self.source}: {text}", *self.other_shape, *self.other, *kept])


__all__ = ["PARTS", "PartReport", "Selection", "matched"]
