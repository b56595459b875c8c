"""The manifest: strict, versioned, the same bytes for the same content."""

import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt.errors import CorruptCheckpointError, ManifestError, ManifestVersionError
from zckpt.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    AliasRecord,
    Digest,
    EvalRecord,
    FileRecord,
    LeftOut,
    Loss,
    Manifest,
    Provenance,
    RunRecord,
    TensorRecord,
    TieRecord,
    UnstoredBuffer,
    json_schema,
    parse_manifest,
)

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "manifest-v1.json"
SCHEMA = HERE.parent / "docs" / "manifest-v1.schema.json"


def digest(digit, algorithm="blake3"):
    return Digest(algorithm=algorithm, hex=digit * 64)


EVERYTHING = Manifest(
    schema_version=1,
    zckpt_version="0.1.0",
    provenance=Provenance(
        source="engine",
        engine="DeepSpeedEngine",
        zero_stage=3,
        world_size=2,
        deepspeed_version="0.19.8",
        torch_version="2.13.0+cpu",
        model="transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel",
        optimizer="AdamW",
        global_step=1000,
        weights="master",
        dtype="bfloat16",
        view="raw",
        removed_prefix="module.",
    ),
    files=(
        FileRecord(name="config.json", size_bytes=612, digest=digest("1")),
        FileRecord(name="model.safetensors", size_bytes=992, digest=digest("2", "blake3-header")),
    ),
    tensors=(
        TensorRecord(
            name="wte.weight",
            role="parameter",
            shape=(16, 8),
            dtype="bfloat16",
            file="model.safetensors",
            start=736,
            end=992,
            digest=digest("3", "blake3-16MiB"),
            trainable=True,
            value_from="master",
            optimizer="AdamW",
        ),
        TensorRecord(
            name="steps",
            role="buffer",
            shape=(),
            dtype="int64",
            file="model.safetensors",
            start=720,
            end=728,
            digest=digest("4", "blake3-16MiB"),
            trainable=False,
            value_from="live",
            optimizer=None,
        ),
        TensorRecord(
            name="ln._extra_state",
            role="extra_state",
            shape=(8,),
            dtype="uint8",
            file="model.safetensors",
            start=728,
            end=736,
            digest=digest("5", "blake3-16MiB"),
            trainable=False,
            value_from="live",
            optimizer=None,
        ),
    ),
    aliases=(AliasRecord(owner="wte.weight", aliases=("lm_head.weight",)),),
    unstored_buffers=(
        UnstoredBuffer(
            name="attn.mask", shape=(1, 4, 4), dtype="bool", digest=digest("6", "blake3-16MiB")
        ),
    ),
    left_out=(LeftOut(name="tuner._extra_state", reason="a dict, not a tensor"),),
    stale_copies=("wte.weight",),
    ties=TieRecord(declared=True, actual=True),
    evaluation=EvalRecord(
        mean=Loss(decimal="2.5", hex="0x1.4000000000000p+1"),
        ranks=(
            Loss(decimal="2.0", hex="0x1.0000000000000p+1"),
            Loss(decimal="3.0", hex="0x1.8000000000000p+1"),
        ),
        weights="live",
        is_of_saved_values=False,
        dtype="bfloat16",
        device="cpu",
        with_stale_copies=Loss(decimal="nan", hex="nan"),
    ),
    warnings=("1 gathered copies disagreed with their partitions: wte.weight.", "größer als nötig"),
)


def edited(*path_and_value):
    """Return the golden file with the value at a path replaced."""
    *path, value = path_and_value
    tree = json.loads(GOLDEN.read_bytes())
    place = tree
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(tree).encode()


# ------------------------------------------------------------------ what is on users' disks


def test_the_golden_file_of_version_1_means_what_it_meant():
    assert parse_manifest(GOLDEN.read_bytes()) == EVERYTHING
    assert EVERYTHING.to_json() == GOLDEN.read_bytes()


def test_the_golden_file_is_plain_json():
    tree = json.loads(GOLDEN.read_bytes())
    assert tree["schema_version"] == SCHEMA_VERSION == 1
    assert tree["tensors"][0]["shape"] == [16, 8]
    assert tree["aliases"] == [{"owner": "wte.weight", "aliases": ["lm_head.weight"]}]
    assert float.fromhex(tree["evaluation"]["mean"]["hex"]) == 2.5
    assert math.isnan(float.fromhex(tree["evaluation"]["with_stale_copies"]["hex"]))
    for key, value in tree.items():
        keys = list(value) if isinstance(value, dict) else []
        assert keys == sorted(keys), key
    assert list(tree) == sorted(tree)


def test_the_shipped_schema_is_the_code_s():
    assert json_schema() == SCHEMA.read_bytes()
    definitions = json.loads(SCHEMA.read_bytes())["$defs"]
    assert definitions["Manifest"]["additionalProperties"] is False
    assert set(definitions["Manifest"]["required"]) == set(json.loads(GOLDEN.read_bytes()))


# ------------------------------------------------------------------ round trips


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation": None, "ties": None},
        {"tensors": (), "aliases": (), "files": ()},
        {"warnings": ('quotes " and \\ and \n',), "stale_copies": ()},
    ],
)
def test_parsing_gives_back_what_was_written(changes):
    manifest = msgspec.structs.replace(EVERYTHING, **changes)
    assert parse_manifest(manifest.to_json()) == manifest
    assert manifest.to_json() != EVERYTHING.to_json()


@settings(deadline=None)
@given(st.text(), st.lists(st.integers(0, 2**62), max_size=3), st.text())
def test_any_name_and_shape_come_back(name, shape, reason):
    record = msgspec.structs.replace(EVERYTHING.tensors[0], name=name, shape=tuple(shape))
    manifest = msgspec.structs.replace(
        EVERYTHING, tensors=(record,), left_out=(LeftOut(name=name, reason=reason),)
    )
    assert parse_manifest(manifest.to_json()) == manifest


def test_equal_manifests_are_equal_bytes():
    """Also when one of them came from text with its keys in another order."""
    tree = json.loads(GOLDEN.read_bytes())
    shuffled = json.dumps({key: tree[key] for key in reversed(tree)}, indent=4).encode()
    assert parse_manifest(shuffled) == EVERYTHING
    assert parse_manifest(shuffled).to_json() == GOLDEN.read_bytes()


def test_a_manifest_cannot_be_changed():
    with pytest.raises(AttributeError):
        EVERYTHING.schema_version = 2


def test_the_run_record_is_plain_json():
    run = RunRecord(saved_at="2026-01-02T03:04:05+00:00", host="here", seconds={"write": 0.25})
    assert json.loads(run.to_json()) == {
        "saved_at": "2026-01-02T03:04:05+00:00",
        "host": "here",
        "seconds": {"write": 0.25},
    }


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "path", [(), ("provenance",), ("files", 0), ("tensors", 1), ("tensors", 1, "digest"), ("ties",)]
)
def test_an_unknown_key_is_refused_by_name(path):
    with pytest.raises(ManifestError, match="surprise") as caught:
        parse_manifest(edited(*path, "surprise", 1), "there/manifest.json")
    assert "there/manifest.json" in str(caught.value)
    assert not isinstance(caught.value, ManifestVersionError)


@pytest.mark.parametrize("version", [0, 2, 99, -1])
def test_another_version_is_refused_as_such(version):
    with pytest.raises(ManifestVersionError, match=f"version {version}"):
        parse_manifest(edited("schema_version", version))


def test_another_version_is_refused_as_such_even_with_other_keys():
    with pytest.raises(ManifestVersionError, match="version 2"):
        parse_manifest(b'{"schema_version": 2, "nothing": "of what version 1 has"}')


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe\x00",
        b'{"schema_version": "1"}',
        b'{"schema_version": 1}',
        b'{"schema_version": 1.5}',
        b"\0" * 100,
    ],
)
def test_garbage_is_refused(text):
    with pytest.raises(ManifestError, match=MANIFEST_NAME) as caught:
        parse_manifest(text)
    assert isinstance(caught.value, CorruptCheckpointError)
    assert not isinstance(caught.value, ManifestVersionError)


def test_every_cut_of_the_golden_file_is_refused():
    text = GOLDEN.read_bytes().rstrip()
    for length in range(len(text)):
        with pytest.raises(ManifestError):
            parse_manifest(text[:length])


def test_a_missing_key_is_refused_by_name():
    for key in json.loads(GOLDEN.read_bytes()):
        tree = json.loads(GOLDEN.read_bytes())
        del tree[key]
        with pytest.raises(ManifestError, match=key):
            parse_manifest(json.dumps(tree).encode())


@pytest.mark.parametrize(
    "path_and_value",
    [
        ("tensors", 0, "shape", "16x8"),
        ("tensors", 0, "start", "736"),
        ("tensors", 0, "role", "gradient"),
        ("tensors", 0, "digest", "algorithm", "md5"),
        ("provenance", "weights", "ema"),
        ("warnings", None),
        ("files", {}),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(path_and_value):
    with pytest.raises(ManifestError):
        parse_manifest(edited(*path_and_value))
