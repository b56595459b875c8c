"""Read a folder that DeepSpeed's `save_checkpoint` wrote, lazily and without DeepSpeed.

Names and shapes come from the model files, values from the byte ranges of the flat fp32 groups in
the optimizer files, and from the model files what the optimizer does not hold. Adam's moments are
never read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zckpt.errors import CorruptCheckpointError, UnsupportedError
from zckpt.layout import InFragments, Whole, fragment_numel
from zckpt.manifest import LeftOut, ValueFrom
from zckpt.names import choose_owner, clean_names, listed, shown, without_wrappers
from zckpt.sources.checkpoint import Checkpoint
from zckpt.sources.zero_files import Shape, ZeroFiles, find_tag, mapping, read_files
from zckpt.sources.zero_layout import (
    Part,
    Placed,
    check_samples,
    has_unpartitioned_masters,
    place,
    place_unpartitioned,
    rounds_to,
)
from zckpt.spec import AliasGroup, DType, Role, TensorSpec
from zckpt.tensors import as_bytes, torch_dtype
from zckpt.torchfile import Checksums, Placeholder, TensorRef, TorchFile


@dataclass(frozen=True)
class ZeroEntry:
    """One distinct tensor of the checkpoint, under all its names."""

    group: AliasGroup
    spec: TensorSpec
    value_from: ValueFrom
    placed: Placed


class ZeroFolder(Checkpoint):
    """One checkpoint of a ZeRO folder; see `Checkpoint`. Make it with `ZeroFolder.open`."""

    def __init__(
        self, files: ZeroFiles, tag: str, notes: Iterable[str], checks: Checksums | None
    ) -> None:
        """Lay out what the files hold. Reads a few elements of each rank's partitions."""
        self.path = files.folder
        self.files = files
        self.tag = tag
        self.kind = f"ZeRO stage {files.stage} folder"
        self.manifest = None
        contents = _Contents(files)
        self.entries: tuple[ZeroEntry, ...] = tuple(contents.entries())
        self._by_name = {entry.group.owner: entry for entry in self.entries}
        self.specs = {name: entry.spec for name, entry in self._by_name.items()}
        self.aliases = {a: e.group.owner for e in self.entries for a in e.group.aliases}
        self.removed_prefix = contents.removed_prefix
        self.spelled = {clean: name for name, clean in contents.clean.items()}
        """How the module spells each name, with the segments of wrappers."""
        self.left_out = tuple(contents.left_out)
        self.missing = tuple(contents.missing)
        """Names of parameters that the module has and whose values are nowhere in the folder."""
        self.lacks_frozen = contents.lacks_frozen
        """Whether it was saved without its frozen parameters, so that not even names are there."""
        self.differing = tuple(contents.differing())
        """Names of buffers that were not the same on every rank; rank 0's values are read."""
        self.notes = (*notes, *files.notes, *contents.notes, *self._lacks())
        opened = (*files.models, *files.optimizers)
        self.file_sizes_bytes = {file.path.name: file.path.stat().st_size for file in opened}
        self._checks = checks
        self._dense: dict[str, Tensor] = {}
        self._dense_lock = threading.Lock()
        self._dense_noted: set[str] = set()

    @classmethod
    def open(
        cls,
        place: Path,
        *,
        tag: str | None = None,
        allowed: frozenset[str] = frozenset(),
        checks: Checksums | None = None,
    ) -> ZeroFolder:
        """Open the checkpoint that `tag`, or else `latest`, names; see `zckpt.open`.

        Args:
            place: the folder of a run, or of one tag.
            tag: the checkpoint in it.
            allowed: names of globals whose calls in pickles are read past.
            checks: takes note of all bytes that are read.
        """
        found = find_tag(place, tag)
        return cls(read_files(found.folder, allowed), found.name, found.notes, checks)

    def _lacks(self) -> Iterator[str]:
        if self.missing:
            yield f"{len(self.missing)} parameters are not in it: {listed(self.missing)}"
        if self.lacks_frozen:
            yield "saved with exclude_frozen_parameters: frozen parameters are not in it"

    @property
    def global_step(self) -> int | None:
        """The engine's optimizer steps, as rank 0 saved them."""
        step = self.files.model.get("global_steps")
        return step if type(step) is int else None

    @property
    def deepspeed_version(self) -> str | None:
        """The DeepSpeed that wrote it."""
        version = self.files.model.get("ds_version")
        return version if isinstance(version, str) else None

    @property
    def facts(self) -> Mapping[str, str]:  # type: ignore[override]
        """What it says about the run that saved it."""
        known = {
            "tag": self.tag,
            "step": self.global_step,
            "ranks": self.files.world_size,
            "deepspeed": self.deepspeed_version,
        }
        return {key: str(value) for key, value in known.items() if value is not None}

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return elements `[start, end)` of the flattened tensor, in new memory."""
        spec = self.check_range(name, start, end)
        entry = self._by_name[spec.name]
        values = torch.empty(end - start, dtype=torch_dtype(spec.dtype), device="cpu")
        placed = entry.placed
        if isinstance(placed.placement, Whole) and not placed.parts[0][0].ref.is_contiguous:
            return values.copy_(self._read_strided(entry)[start:end])
        placed.fill(as_bytes(values), start, end, self._checks)
        if placed.rounds_to is not None and not rounds_to(values, placed.rounds_to, start):
            raise CorruptCheckpointError(
                f"{placed.rounds_to.file.path}: the fp32 values at the place of {spec.name} do not "
                "round to its 16-bit ones, so they are in another order than the parameters of the "
                "module, or of another save."
            )
        return values

    def _read_strided(self, entry: ZeroEntry) -> Tensor:
        """Return a tensor whose elements are not in row-major order in its file, flattened.

        Memory: the two that were asked for last are kept, as they are read as a whole.
        """
        name = entry.group.owner
        with self._dense_lock:
            if name not in self._dense:
                file, ref = entry.placed.parts[0][0]
                held = torch.empty(ref.reach, dtype=torch_dtype(ref.dtype), device="cpu")
                first = ref.offset * ref.dtype.size_bytes
                file.read_into(as_bytes(held), ref.storage, first)
                if self._checks is not None and name not in self._dense_noted:
                    self._checks.note(file, ref.storage, first, as_bytes(held))
                    self._dense_noted.add(name)
                while len(self._dense) > 1:
                    del self._dense[next(iter(self._dense))]
                self._dense[name] = held.as_strided(ref.shape, ref.stride).reshape(-1)
            return self._dense[name]


# ------------------------------------------------------------------ what is in the files


class _Contents:
    """Names, and where the values of each lie. One use: build it, then `entries`."""

    def __init__(self, files: ZeroFiles) -> None:
        self.files = files
        self.left_out: list[LeftOut] = []
        self.missing: list[str] = []
        self.notes: list[str] = []
        self.module: dict[str, TensorRef] = {}
        """The tensors of the module's state dict, placeholders too."""
        for name, value in files.module.items():
            if isinstance(value, TensorRef):
                files.models[0].check(value)
                self.module[name] = value
            elif isinstance(value, Placeholder) and not _is_extra_state(name):
                raise UnsupportedError(
                    f"{files.models[0].path}: {name} is made by {value.name}, which safetensors "
                    "cannot hold; zckpt reads dense tensors of the common dtypes."
                )
            else:
                reason = f"a {type(value).__name__}, not a tensor"
                self.left_out.append(LeftOut(name=without_wrappers(name), reason=reason))
        self._keys = {without_wrappers(name): name for name in self.module}
        shapes = [self._renamed(group) for group in files.param_shapes]
        frozen = files.frozen_shapes
        self.owned: dict[str, Shape] = {n: s for group in shapes for n, s in group.items()}
        self.frozen = {n: s for n, s in self._renamed(frozen or {}).items() if n not in self.owned}
        self.listed = self.owned | self.frozen
        self.lacks_frozen = (
            frozen is None and files.stage >= 2 and "frozen_param_shapes" in files.model
        )
        names = files.model.get("buffer_names")
        names = names if isinstance(names, (list, tuple, set)) else ()
        self.buffers = {self._key(name) for name in names if isinstance(name, str)}
        self.buffers |= self._other_names_of_buffers()
        self._compare_shapes()
        if files.stage == 0:
            self.placed = place_unpartitioned(files, self._distinct_parameters())
            if not self.placed and has_unpartitioned_masters(files):
                self.notes.append(
                    "the fp32 masters of this stage 0 run were not taken: nothing says which is "
                    "whose; the values are the module's own"
                )
        else:
            self.placed = place(files, shapes)
            self._check_rounding()
        unknown = [name for name in self.listed if name not in self.module]
        if unknown:
            self.notes.append(
                f"{len(unknown)} parameters that it lists are not in the module's state dict: "
                f"{listed(unknown)}"
            )
        everything = [*self.module, *unknown]
        cleaned, self.removed_prefix = clean_names(everything)
        self.clean = dict(zip(everything, cleaned, strict=True))

    def _other_names_of_buffers(self) -> set[str]:
        """Return the further names of buffers: DeepSpeed lists each buffer once."""
        known = {
            (ref.storage.key, ref.offset, ref.shape)
            for name, ref in self.module.items()
            if name in self.buffers
        }
        return {
            name
            for name, ref in self.module.items()
            if (ref.storage.key, ref.offset, ref.shape) in known
        }

    def _key(self, name: str) -> str:
        """Return the module's spelling of a name, which may have wrapper segments elsewhere."""
        return name if name in self.module else self._keys.get(without_wrappers(name), name)

    def _renamed(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        return {self._key(name): shape for name, shape in shapes.items()}

    def _compare_shapes(self) -> None:
        """Compare the shapes that the checkpoint lists with those of the module's tensors."""
        for name, shape in self.listed.items():
            ref = self.module.get(name)
            if ref is not None and not self._is_placeholder(name) and ref.shape != shape:
                raise CorruptCheckpointError(
                    f"{self.files.models[0].path}: {shown(name)} has shape {list(ref.shape)} in "
                    f"the module and {list(shape)} in the list of shapes."
                )

    def _check_rounding(self) -> None:
        """Compare a few masters with the module's weights, and the steps of the two files."""
        note = check_samples(self.files, self.placed, self.module)
        if note is not None and self.files.other_step is not None:
            raise CorruptCheckpointError(
                f"{self.files.models[0].path} is of another save than the optimizer files: "
                f"{self.files.other_step}; and {note}."
            )
        self.notes += [said for said in (note, self.files.other_step) if said is not None]

    # -------------------------------------------------------------- names

    def _distinct_parameters(self) -> list[str]:
        """Return the module's parameters, each under its first name, in order."""
        first: dict[object, str] = {}
        for name in self.module:
            if name not in self.buffers:
                first.setdefault(self._view(name) or name, name)
        return list(first.values())

    def entries(self) -> Iterator[ZeroEntry]:
        """Yield each distinct tensor once, in the order of the module's state dict."""
        members: dict[object, list[str]] = {}
        identity = self._identities()
        for name in self.clean:
            members.setdefault(identity[name], []).append(name)
        for names in members.values():
            owner = next((name for name in names if name in self.listed), names[0])
            group = choose_owner([self.clean[name] for name in names], ())
            entry = self._entry(owner, group)
            if entry is None:
                self.missing += [self.clean[name] for name in names]
            else:
                yield entry

    def _identities(self) -> dict[str, object]:
        """Return a key for each name that is equal for the names of one tensor.

        What the optimizer or the list of frozen parameters names is a tensor of its own. Any other
        name is the same tensor as one of these where the file shares their storage, or where
        `shared_params` says so and the shapes agree. (Before stage 3 it compares addresses, which
        are 0 for all tensors without elements.)
        """
        by_storage: dict[object, str] = {}
        for name in self.listed:
            if name in self.module and (view := self._view(name)) is not None:
                by_storage.setdefault(view, name)
        shared = self._shared_params()
        found: dict[str, object] = {}
        for name in self.clean:
            view = self._view(name) if name in self.module else None
            target = name if name in self.listed else shared.get(name)
            if target is None and view is not None:
                target = by_storage.get(view)
            found[name] = target or view or name
        return found

    def _view(self, name: str) -> object:
        """Return what the names of one tensor have in common; None where that cannot be said."""
        ref = self.module[name]
        if self._is_placeholder(name):
            return ("placeholder", ref.storage.key)
        if not ref.numel and name in self.listed:
            return None  # in a flat buffer two of them may lie at one place
        return (ref.storage.key, ref.offset, ref.shape, ref.stride, ref.dtype)

    def _shared_params(self) -> dict[str, str]:
        """Return what `shared_params` says, as far as nothing speaks against it."""
        said = self.files.model.get("shared_params")
        if not isinstance(said, Mapping):
            return {}
        pairs = {
            self._key(alias): self._key(target)
            for alias, target in said.items()
            if isinstance(alias, str) and isinstance(target, str)
        }
        return {a: t for a, t in pairs.items() if t in self.listed and self._may_be(a, t)}

    def _may_be(self, alias: str, target: str) -> bool:
        """Whether nothing speaks against two names being one tensor."""
        if alias not in self.module or self._is_placeholder(alias):
            return alias in self.module
        ref = self.module[alias]
        return ref.numel > 0 and ref.shape == self.listed[target]

    def _is_placeholder(self, name: str) -> bool:
        """Whether a tensor of the module is what stage 3 leaves of a parameter."""
        return (
            self.files.stage == 3
            and self.module[name].shape == (0,)
            and name not in self.buffers
            and not _is_extra_state(name)
        )

    # -------------------------------------------------------------- values

    def _entry(self, name: str, group: AliasGroup) -> ZeroEntry | None:
        """Return the entry of a name, or None where its values are nowhere."""
        role = self._role(name)
        if name in self.placed:
            placed = self.placed[name]
            shape = self.owned[name] if name in self.owned else self.module[name].shape
            spec = _spec(group.owner, shape, placed.dtype, role)
            return ZeroEntry(group, spec, "master", placed)
        if name in self.frozen:
            return self._frozen_entry(name, group)
        if name not in self.module or self._is_placeholder(name):
            return None
        ref = self.module[name]
        value_from: ValueFrom = "live"
        if role == "parameter" and self.files.frozen_shapes is not None:
            value_from = "unowned"
        spec = _spec(group.owner, ref.shape, ref.dtype, role)
        parts = [[Part(self.files.models[0], ref)]]
        return ZeroEntry(group, spec, value_from, Placed(ref.dtype, Whole(), parts))

    def _role(self, name: str) -> Role:
        if name in self.buffers:
            return "buffer"
        is_extra = _is_extra_state(name) and name not in self.listed
        return "extra_state" if is_extra else "parameter"

    def _frozen_entry(self, name: str, group: AliasGroup) -> ZeroEntry | None:
        shape = self.frozen[name]
        numel, ranks = math.prod(shape), len(self.files.models)
        expected = fragment_numel(numel, ranks)  # all of it where there is one model file
        for file, fragments in zip(self.files.models, self._fragments, strict=True):
            ref = fragments.get(name)
            if ref is None:
                return None
            file.check(ref)
            if ref.numel != expected or not ref.dtype.is_floating:
                raise CorruptCheckpointError(
                    f"{file.path}: the frozen {name} has {ref.numel} elements of {ref.dtype.name} "
                    f"where its shape {list(shape)} asks for {expected} floating ones on each of "
                    f"{ranks} ranks. Quantized parameters cannot be read."
                )
        parts = _Fragments(name, self.files.models, self._fragments)
        dtype = parts[0][0].ref.dtype
        placement = Whole() if ranks == 1 or not numel else InFragments(expected, 0, (0, expected))
        spec = _spec(group.owner, shape, dtype, "parameter")
        return ZeroEntry(group, spec, "frozen", Placed(dtype, placement, parts))

    @cached_property
    def _fragments(self) -> tuple[Mapping[str, TensorRef], ...]:
        """What each model file has of frozen parameters."""
        return tuple(
            {
                self._key(name): ref
                for name, ref in mapping(file, "frozen_param_fragments").items()
                if isinstance(ref, TensorRef)
            }
            if file.tree.get("frozen_param_fragments") is not None
            else {}
            for file in self.files.models
        )

    def differing(self) -> Iterator[str]:
        """Yield the buffers that were not the same on every rank, as far as their CRC-32 tells."""
        first, *others = self.files.models
        for name in self.module:
            if self._is_placeholder(name) or name in self.listed:
                continue
            expected = first.fingerprint(self.module[name])
            refs = [(file, mapping(file, "module").get(name)) for file in others]
            if any(
                isinstance(ref, TensorRef) and file.fingerprint(ref) != expected
                for file, ref in refs
            ):
                yield self.clean[name]


def _is_extra_state(name: str) -> bool:
    """Whether a name is the one that torch gives to what `get_extra_state` returned."""
    return name.rsplit(".", 1)[-1] == "_extra_state"


class _Fragments(Sequence[Sequence[Part]]):
    """The fragments of one frozen parameter, by rank. Made when asked for: ranks are many."""

    def __init__(
        self,
        name: str,
        files: Sequence[TorchFile],
        fragments: Sequence[Mapping[str, TensorRef]],
    ) -> None:
        self._name = name
        self._files = files
        self._fragments = fragments

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, rank: Any) -> Any:
        return (Part(self._files[rank], self._fragments[rank][self._name]),)


def _spec(name: str, shape: Shape, dtype: DType, role: Role) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, role=role)
