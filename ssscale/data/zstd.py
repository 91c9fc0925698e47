"""Reads .zst files whole. zstandard's own reader ends without an error where a file is cut off."""

import io
from typing import IO, Any

import zstandard

LARGEST_WINDOW = 2**31  # bytes, that of `zstd --long=31`
AT_ONCE = 2**12  # compressed bytes; a block of 4 bytes can stand for 128 KiB, so these can become 128 MiB


class _Frames(io.RawIOBase):
    def __init__(self, raw: IO[bytes]) -> None:
        self.raw = raw
        self.frame: Any = None  # decompresses the current frame; None: between frames
        self.left = b""  # compressed bytes after a frame
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            data = self.left or self.raw.read(AT_ONCE)
            if not data and self.frame is not None:
                raise EOFError("Compressed file ended before the end of a frame")
            if not data:
                return 0
            if self.frame is None:
                self.frame = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()
            self.ready, self.left = memoryview(self.frame.decompress(data)), b""
            if self.frame.eof:
                self.left, self.frame = self.frame.unused_data, None
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count


def decompressed(raw: IO[bytes]) -> io.BufferedReader:
    """Returns the content of all frames of `raw`, in sequence.

    Reading raises EOFError if the last frame is cut off, and zstandard.ZstdError if the content is damaged.
    """
    return io.BufferedReader(_Frames(raw), buffer_size=1 << 20)
