"""Checksums in manifests are plain CRC-32, so that any tool can check a file."""

import os
import zlib

from shardwise.checkpoint.disk import crc32, crc32_text


def test_it_is_the_standard_librarys_crc32_whole_or_in_parts():
    data = os.urandom(100_001)
    expected = zlib.crc32(data)
    assert crc32(data) == expected
    assert crc32(memoryview(data)[777:], crc32(memoryview(data)[:777])) == expected
    assert crc32_text(data) == f"{expected:08x}"
    assert crc32(b"") == 0
