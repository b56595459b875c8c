"""The digest of a tensor, as docs/format.md defines it, computed here from the words alone."""

import pytest
import torch
from blake3 import blake3

import zckpt
from zckpt.tensors import digest_of_tensor

MIB = 1 << 20


def defined(data):
    blocks = [data[i : i + 16 * MIB] for i in range(0, len(data), 16 * MIB)]
    return blake3(b"".join(blake3(block).digest() for block in blocks)).hexdigest()


@pytest.mark.parametrize("numel", [0, 1, 5, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 13 * MIB])
def test_a_tensors_digest_is_that_of_its_blocks_digests(numel, tmp_path):
    values = torch.rand(numel, generator=torch.Generator().manual_seed(1))
    expected = defined(values.numpy().tobytes())
    assert digest_of_tensor(values).hex == expected
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(values)
    report = zckpt.save_consolidated(module, tmp_path / "out", bucket_bytes=MIB)
    (record,) = report.manifest.tensors
    assert (record.digest.algorithm, record.digest.hex) == ("blake3-16MiB", expected)
    assert zckpt.open(tmp_path / "out").digest("weight").hex == expected
    assert zckpt.verify(tmp_path / "out").tensors_checked == 1
