"""Names of tensors: wrapper segments, patterns, and which name of a shared tensor owns it.

Pure string work. The only place that decides what a wrapper is called and who owns an alias group.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from zckpt.errors import NameCollisionError, UsageError
from zckpt.spec import AliasGroup

WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Path segments that torch.compile and activation-checkpoint wrappers put into names."""

OUTER_PREFIX = "module."
"""What data-parallel wrappers put before every name."""


def without_wrappers(name: str) -> str:
    """Return `name` without wrapper segments, wherever in the path they stand."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def clean_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Return the names as they are stored, and the outer prefix that was taken off.

    Wrapper segments go wherever they stand. An outermost `module.` goes only when every name has
    it: a model with a child called `module` beside others keeps its names.

    Raises:
        NameCollisionError: two names become one.
    """
    cleaned = [without_wrappers(name) for name in names]
    prefix = OUTER_PREFIX if cleaned and all(n.startswith(OUTER_PREFIX) for n in cleaned) else ""
    cleaned = [name.removeprefix(prefix) for name in cleaned]
    first: dict[str, str] = {}
    for original, name in zip(names, cleaned, strict=True):
        other = first.setdefault(name, original)
        if other != original:
            raise NameCollisionError(
                f"{other!r} and {original!r} would both be stored as {name!r} once the wrapper "
                "segments are removed; rename one of the two modules."
            )
    return cleaned, prefix


def choose_owner(names: Sequence[str], tied_patterns: Iterable[str]) -> AliasGroup:
    """Return the alias group of `names` with the owner that Hugging Face would keep.

    The owner is the first name that no pattern of `_tied_weights_keys` matches, or the first name
    where all or none match. Patterns are searched as regular expressions, as transformers does.
    """
    patterns = [re.compile(pattern) for pattern in tied_patterns]
    kept = [name for name in names if not any(p.search(name) for p in patterns)]
    owner = kept[0] if kept else names[0]
    return AliasGroup(owner, tuple(name for name in names if name != owner))


def as_patterns(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return the patterns as a tuple; one string is one pattern, not its letters.

    Raises:
        UsageError: they are no strings.
    """
    try:
        found = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    except TypeError:
        raise UsageError(f"{patterns!r}: expected a pattern, or several.") from None
    if not all(isinstance(pattern, str) for pattern in found):
        raise UsageError(f"{found!r}: expected patterns, which are text.")
    return found


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a shell-style pattern (`*`, `?`, `[...]`, case-sensitive) matches all of `name`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def reconcile_prefix(source_names: Iterable[str], target_names: Iterable[str]) -> tuple[str, str]:
    """Return `(remove, add)`: what to take off and put before source names to meet the target's.

    Only an outermost `module.` is ever touched, and only when the two sides have no name in common
    and every name on one side carries it.
    """
    source, target = set(source_names), set(target_names)
    if not source or not target or source & target:
        return "", ""
    if all(name.startswith(OUTER_PREFIX) for name in source):
        return OUTER_PREFIX, ""
    if all(name.startswith(OUTER_PREFIX) for name in target):
        return "", OUTER_PREFIX
    return "", ""


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return the names as one readable line, cut after `most` with a count of the rest."""
    all_names = list(names)
    rest = len(all_names) - most
    return ", ".join(map(shown, all_names[:most])) + (f" and {rest} more" if rest > 0 else "")


def shown(text: object, most: int = 300) -> str:
    """Return text from a file as one line to print: control characters escaped, cut if long."""
    line = str(text)[: most + 1]
    line = line if line.isprintable() else line.encode("unicode_escape").decode("ascii")
    return line if len(line) <= most else f"{line[:most]}…"
