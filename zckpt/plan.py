"""From specs to a save plan: which tensor goes where, in which bucket, written by which rank.

Pure: no torch, no files, no ranks. Every rank makes the same plan from the same specs, so nothing
of it has to be communicated. Every byte offset is known before a single tensor is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zckpt.digests import Block, blocks_of
from zckpt.errors import UsageError
from zckpt.spec import AliasGroup, DType, Span, TensorSpec

INDEX_NAME = "model.safetensors.index.json"
"""The file with which Hugging Face maps names to files when there is more than one."""

FILE_PATTERN = "model{suffix}.safetensors"
"""Hugging Face's file name, as a template for its splitting function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """Where one stored tensor goes."""

    spec: TensorSpec
    file: str
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One safetensors file: its header, complete, and its final size."""

    name: str
    header: bytes
    """Length prefix, JSON and padding: everything before the first tensor's bytes."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """Which tensor goes where: all offsets are decided before the first byte is read."""

    files: tuple[PlannedFile, ...]
    tensors: Mapping[str, PlannedTensor]
    """By owner name, in the order of the specs."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all safetensors files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def main_dtype(self) -> DType | None:
        """The dtype in which most bytes of floating parameters are stored, or None without any."""
        bytes_of: Counter[DType] = Counter()
        for tensor in self.tensors.values():
            if tensor.spec.role == "parameter" and tensor.spec.dtype.is_floating:
                bytes_of[tensor.spec.dtype] += tensor.spec.size_bytes
        return max(bytes_of, key=bytes_of.__getitem__) if bytes_of else None

    @property
    def index(self) -> bytes | None:
        """The Hugging Face index, or None when there is one file."""
        if len(self.files) == 1:
            return None
        weight_map = {name: tensor.file for name, tensor in self.tensors.items()}
        total_size = sum(tensor.spec.size_bytes for tensor in self.tensors.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan(FilePlan):
    """A file plan, and which rank writes what of it when."""

    buckets: tuple[tuple[str, ...], ...]
    """Owner names handled in one window, in the order of the specs."""
    shares: tuple[tuple[tuple[Block, ...], ...], ...]
    """The blocks that each rank writes, by bucket and rank."""


def make_plan(
    specs: Sequence[TensorSpec],
    groups: Sequence[AliasGroup],
    *,
    max_shard_size: int | str,
    bucket_bytes: int,
    window_bytes: Mapping[str, int],
    writer_ranks: int,
    rank_0_only: frozenset[str] = frozenset(),
) -> SavePlan:
    """Return where every tensor goes.

    Args:
        specs: the tensors to store, one per owner, in state-dict order.
        groups: the alias group of each spec, in the same order.
        max_shard_size: largest file, in bytes or as `"5GB"` (decimal, as Hugging Face counts). A
            larger tensor gets a file of its own.
        bucket_bytes: most bytes handled in one window; a larger tensor is a bucket of its own.
        window_bytes: bytes that handling a tensor takes in memory, by owner name, in the order of
            the specs.
        writer_ranks: ranks 0 to `writer_ranks - 1` write; each bucket is dealt to them so that
            they get about the same number of bytes.
        rank_0_only: owner names whose values only rank 0 can vouch for.

    Raises:
        UsageError: nothing to store, or a size that makes no sense.
    """
    plan = plan_files(specs, groups, max_shard_size=max_shard_size)
    buckets = tuple(fill_buckets(window_bytes, bucket_bytes))
    by_name = {spec.name: spec for spec in specs}
    shares = deal([[by_name[n] for n in bucket] for bucket in buckets], writer_ranks, rank_0_only)
    return SavePlan(files=plan.files, tensors=plan.tensors, buckets=buckets, shares=shares)


def plan_files(
    specs: Sequence[TensorSpec], groups: Sequence[AliasGroup], *, max_shard_size: int | str
) -> FilePlan:
    """Return where every tensor goes; arguments and errors as those of `make_plan`."""
    if any(name == "__metadata__" for group in groups for name in group.names):
        raise UsageError("a tensor called __metadata__ cannot be stored: safetensors reserves it.")
    if not specs:
        raise UsageError("there is nothing to save: the model has no parameters and no buffers.")
    aliases = {group.owner: group.aliases for group in groups}
    by_name = {spec.name: spec for spec in specs}
    files: list[PlannedFile] = []
    planned: dict[str, PlannedTensor] = {}
    for name, members in _split_into_files(specs, max_shard_size).items():
        file, spans = lay_out_file(name, [by_name[m] for m in members], aliases)
        files.append(file)
        for member, span in spans.items():
            planned[member] = PlannedTensor(spec=by_name[member], file=name, span=span)
    ordered = {spec.name: planned[spec.name] for spec in specs}
    return FilePlan(files=tuple(files), tensors=ordered)


def lay_out_file(
    name: str, specs: Iterable[TensorSpec], aliases: Mapping[str, Sequence[str]]
) -> tuple[PlannedFile, dict[str, Span]]:
    """Return a safetensors file's header and size, and each tensor's span.

    The widest dtypes come first, so that every tensor is aligned, then the order is by name. The
    metadata maps each alias to its owner, the convention that `safetensors.torch.load_model` reads.
    Format: https://github.com/huggingface/safetensors#format
    """
    ordered = sorted(specs, key=lambda spec: (-spec.dtype.size_bytes, spec.name))
    metadata = {alias: spec.name for spec in ordered for alias in aliases.get(spec.name, ())}
    entries: dict[str, object] = {"__metadata__": {**metadata, "format": "pt"}}
    relative: dict[str, Span] = {}
    end = 0
    for spec in ordered:
        start, end = end, end + spec.size_bytes
        relative[spec.name] = Span(start, end)
        entries[spec.name] = {
            "dtype": spec.dtype.code,
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    base = len(header)
    spans = {key: Span(base + span.start, base + span.end) for key, span in relative.items()}
    return PlannedFile(name=name, header=header, size_bytes=base + end), spans


def deal(
    buckets: Iterable[Sequence[TensorSpec]], ranks: int, rank_0_only: frozenset[str] = frozenset()
) -> tuple[tuple[tuple[Block, ...], ...], ...]:
    """Return the blocks that each rank handles, by bucket and rank.

    Each bucket's blocks, in order, are cut into as many runs of about equal bytes as there are
    ranks. The first run goes to another rank in each bucket, so that buckets of one block go to the
    ranks in turn.
    """
    return tuple(
        _deal_bucket(bucket, ranks, rank_0_only, turn) for turn, bucket in enumerate(buckets)
    )


def _deal_bucket(
    bucket: Sequence[TensorSpec], ranks: int, rank_0_only: frozenset[str], turn: int
) -> tuple[tuple[Block, ...], ...]:
    shares: list[list[Block]] = [[] for _ in range(ranks)]
    shared = [block for s in bucket if s.name not in rank_0_only for block in blocks_of(s)]
    total_bytes = sum(block.size_bytes for block in shared)
    before = 0
    for block in shared:
        middle = before + block.size_bytes // 2
        shares[(middle * ranks // total_bytes + turn) % ranks].append(block)
        before += block.size_bytes
    shares[0] += [block for s in bucket if s.name in rank_0_only for block in blocks_of(s)]
    return tuple(map(tuple, shares))


def fill_buckets(window_bytes: Mapping[str, int], bucket_bytes: int) -> Iterator[tuple[str, ...]]:
    """Yield the names in order, in buckets of at most `bucket_bytes` or of one name.

    Raises:
        UsageError: a bucket size that is not positive.
    """
    if bucket_bytes <= 0:
        raise UsageError(f"bucket_bytes must be positive, got {bucket_bytes}.")
    bucket: list[str] = []
    filled = 0
    for name, size in window_bytes.items():
        if bucket and filled + size > bucket_bytes:
            yield tuple(bucket)
            bucket, filled = [], 0
        bucket.append(name)
        filled += size
    if bucket:
        yield tuple(bucket)


def _split_into_files(
    specs: Sequence[TensorSpec], max_shard_size: int | str
) -> dict[str, list[str]]:
    from huggingface_hub import split_state_dict_into_shards_factory
    from huggingface_hub.serialization._base import parse_size_to_int

    try:
        limit_bytes = (
            parse_size_to_int(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
        )
        if not limit_bytes >= 1:
            raise ValueError("it must be at least one byte")
        split = split_state_dict_into_shards_factory(
            {spec.name: spec for spec in specs},
            get_storage_size=lambda spec: spec.size_bytes,
            filename_pattern=FILE_PATTERN,
            max_shard_size=limit_bytes,
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"max_shard_size={max_shard_size!r} is not a size: {error}") from None
    return split.filename_to_tensors
