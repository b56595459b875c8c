"""`zckpt inspect`: what a checkpoint is and what is in it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from rich.tree import Tree

from zckpt.cli.output import AsJson, Quiet, count, human, print_json, print_notes, stdout

if TYPE_CHECKING:
    from zckpt.manifest import EvalRecord, Loss, Manifest, Provenance
    from zckpt.verbs.inspect import Inspection

EXAMPLES = (
    "zckpt inspect out/checkpoint-500",
    "zckpt inspect out/checkpoint-500 --depth 3",
    "zckpt inspect model.safetensors --json",
    "zckpt inspect checkpoints/run --tag global_step500",
)


def command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A zckpt or Hugging Face safetensors folder, one such file, or a ZeRO folder.",
        ),
    ],
    *,
    tag: Annotated[
        str | None,
        typer.Option(
            metavar="TAG",
            help="Which checkpoint of a ZeRO folder; without it the one that `latest` names.",
        ),
    ] = None,
    depth: Annotated[
        int, typer.Option(min=1, help="Levels of the tree to show; what lies below is counted.")
    ] = 8,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what a checkpoint is and what is in it, without reading a tensor.

    Layers that are alike are shown once. --json lists everything.

    A ZeRO folder is shown as `zckpt convert` would write it, with fp32 masters.
    Nothing in its pickles is run.
    """
    from zckpt.verbs.inspect import inspect

    inspection = inspect(path, tag=tag)
    print_notes((*_unknown(inspection), *inspection.notes), quiet=quiet)
    (_print_document if as_json else _print)(inspection, depth)


def _unknown(inspection: "Inspection") -> Iterator[str]:
    """Yield what a manifest would say, of a folder that could have one."""
    if inspection.manifest is None and not inspection.facts:
        yield "no manifest: origins, buffers and evaluation are not known"


def _print_document(inspection: "Inspection", _: int) -> None:
    print_json(
        {
            "path": inspection.path,
            "kind": inspection.kind,
            "size_bytes": inspection.size_bytes,
            "files": inspection.file_sizes_bytes,
            "tensors": [
                {
                    "name": spec.name,
                    "role": spec.role,
                    "shape": spec.shape,
                    "dtype": spec.dtype.name,
                    "numel": spec.numel,
                    "size_bytes": spec.size_bytes,
                }
                for spec in inspection.tensors
            ],
            "aliases": inspection.aliases,
            "facts": inspection.facts,
            "notes": inspection.notes,
            "manifest": inspection.manifest,
        }
    )


def _print(inspection: "Inspection", depth: int) -> None:
    console = stdout()
    console.print(Text.assemble((inspection.kind, "bold"), f" {inspection.path}"), soft_wrap=True)
    for title, value in _facts(inspection):
        console.print(Text.assemble((f"{title:12}", "bold"), value), soft_wrap=True)
    console.print(_tree(inspection, depth))


# ------------------------------------------------------------------ facts


def _facts(inspection: "Inspection") -> Iterator[tuple[str, str]]:
    dtypes = sorted({spec.dtype.name for spec in inspection.tensors})
    numel = sum(spec.numel for spec in inspection.tensors)
    stored = f"{count(len(inspection.tensors), 'tensor')}, {numel:,} elements"
    files = count(len(inspection.file_sizes_bytes), "file")
    size = human(inspection.size_bytes)
    yield "tensors", f"{stored}, {size} in {files} ({', '.join(dtypes)})"
    if inspection.aliases:
        yield "aliases", f"{count(len(inspection.aliases), 'more name')}, marked ->"
    yield from inspection.facts.items()
    manifest = inspection.manifest
    if manifest is None:
        return
    yield "saved", _provenance(manifest.provenance)
    yield "with", _versions(manifest)
    if manifest.evaluation is not None:
        yield from _evaluation(manifest.evaluation)
    for left in manifest.left_out:
        yield "left out", f"{left.name}: {left.reason}"
    for warning in manifest.warnings:
        if not warning.startswith("left out: "):
            yield "warning", warning


def _provenance(origin: "Provenance") -> str:
    step = "" if origin.global_step is None else f" at step {origin.global_step}"
    stage = "" if origin.zero_stage is None else f", ZeRO stage {origin.zero_stage}"
    optimizer = "" if origin.optimizer is None else f", {origin.optimizer}"
    cast = "" if origin.dtype is None else f" cast to {origin.dtype}"
    of = "" if origin.model is None else f" of {origin.model}"
    tag = "" if origin.tag is None else f", tag {origin.tag}"
    return (
        f"{origin.weights} weights{cast}{of}{step}, from a {origin.engine or origin.source}{tag} "
        f"on {count(origin.world_size, 'rank')}{stage}{optimizer}"
    )


def _versions(manifest: "Manifest") -> str:
    origin = manifest.provenance
    versions = f"zckpt {manifest.zckpt_version}, torch {origin.torch_version}"
    if origin.deepspeed_version is None:
        return versions
    return f"{versions}, deepspeed {origin.deepspeed_version}"


def _evaluation(record: "EvalRecord") -> Iterator[tuple[str, str]]:
    where = f"{record.dtype} on {record.device}, {count(len(record.ranks), 'rank')}"
    of = "" if record.is_of_saved_values else "; of the live weights, not of the saved values"
    yield "evaluation", f"{_loss(record.mean)}  ({where}{of})"
    if record.with_stale_copies is not None:
        yield "", f"{_loss(record.with_stale_copies)}  (with the stale copies in place)"


def _loss(loss: "Loss") -> str:
    return f"{loss.decimal}  {loss.hex}"


# ------------------------------------------------------------------ tree


_MOST_DEPTH = 64
"""Levels of the tree; what lies deeper is shown as one name."""


@dataclass(slots=True)
class _Node:
    """A part of a dotted name, and the tensor that ends there."""

    leaf: str | None = None
    marks: tuple[str, ...] = ()
    own_bytes: int = 0
    is_stored: bool = False
    children: dict[str, "_Node"] = field(default_factory=dict)
    tensors: int = 0
    """Stored tensors at and below."""
    size_bytes: int = 0
    """Their bytes."""
    signature: tuple[Any, ...] = ()
    """Equal for nodes that look the same apart from their own name."""

    def sum_up(self) -> None:
        """Fill what is known only when the tree is complete."""
        for child in self.children.values():
            child.sum_up()
        below = self.children.values()
        self.tensors = self.is_stored + sum(child.tensors for child in below)
        self.size_bytes = self.own_bytes + sum(child.size_bytes for child in below)
        names = tuple((name, child.signature) for name, child in self.children.items())
        self.signature = (self.leaf, self.marks, names)


def _tree(inspection: "Inspection", depth: int) -> Tree:
    root, manifest = _Node(), inspection.manifest
    records = {record.name: record for record in manifest.tensors} if manifest else {}
    for spec in inspection.tensors:
        node = _at(root, spec.name)
        node.leaf = f"{list(spec.shape)} {spec.dtype.name}"
        node.own_bytes, node.is_stored = spec.size_bytes, True
        record = records.get(spec.name)
        role = () if spec.role == "parameter" else (spec.role.replace("_", " "),)
        origin = () if record is None or record.value_from not in _ODD else (record.value_from,)
        node.marks = role + origin
    for alias, owner in inspection.aliases.items():
        _at(root, alias).leaf = f"-> {owner}"
    for buffer in manifest.unstored_buffers if manifest else ():
        node = _at(root, buffer.name)
        node.leaf, node.marks = f"{list(buffer.shape)} {buffer.dtype}", ("buffer, not stored",)
    root.sum_up()
    tree = Tree(_label(inspection.path.name, root, 1))
    _grow(tree, root, depth)
    return tree


_ODD = {"frozen", "unowned"}
"""The origins that are worth a mark."""


def _at(root: _Node, name: str) -> _Node:
    node = root
    for part in name.split(".", _MOST_DEPTH):
        node = node.children.setdefault(part, _Node())
    return node


def _grow(tree: Tree, node: _Node, depth: int) -> None:
    """Add what is below a node: equal neighbours once, chains without a fork on one line."""
    for names, first in _runs(node.children):
        name, child = "-".join(dict.fromkeys((names[0], names[-1]))), first
        while child.leaf is None and len(child.children) == 1:
            ((part, child),) = child.children.items()
            name += f".{part}"
        branch = tree.add(_label(name, child, len(names)))
        if depth > 1:
            _grow(branch, child, depth - 1)


def _runs(children: dict[str, _Node]) -> Iterator[tuple[list[str], _Node]]:
    """Yield names whose nodes look the same and are numbered one after the other, and the first."""
    names: list[str] = []
    for name, node in children.items():
        if names:
            first = children[names[0]]
            is_next = name.isdecimal() and names[-1].isdecimal() and int(name) == int(names[-1]) + 1
            if is_next and node.signature == first.signature:
                names.append(name)
                continue
            yield names, first
        names = [name]
    if names:
        yield names, children[names[0]]


def _label(name: str, node: _Node, alike: int) -> Text:
    label = Text(name, "bold" if node.children else "")
    each = " each" if alike > 1 else ""
    if alike > 1:
        label.append(f"  {alike} alike", "yellow")
    if node.leaf is not None:
        label.append(f"  {node.leaf}", "cyan")
    if node.children:
        label.append(f"  {count(node.tensors, 'tensor')}{each}", "dim")
    if node.tensors:
        label.append(f"  {human(node.size_bytes)}{each}", "green")
    if alike > 1 and node.tensors:
        label.append(f"  {human(alike * node.size_bytes)} together", "green")
    if node.marks:
        label.append(f"  ({', '.join(node.marks)})", "magenta")
    return label
