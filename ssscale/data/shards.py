"""Random access to the rows of a source's MDS shards, local or remote. The hash of a shard is checked before it is read.

mosaicml-streaming's `Stream` downloads and decompresses the shards. Its StreamingDataset is not used, because we need our
own order (`order.py`), and because its shared memory remains after a run is killed.
"""

import errno
import json
import os
import re
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from filelock import FileLock

from ssscale.data.batch import Row
from ssscale.data.order import WINDOW
from ssscale.data.streaming_patches import import_streaming
from ssscale.errors import UserError
from ssscale.names import bad_shard_name, leads_out
from ssscale.patience import patiently

OPEN_SHARDS = 2 * WINDOW  # per source. A shard that is open can still be read after the cache has deleted its file
INDEX = "index.json"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
# Errors of network file systems that may pass
TEMPORARY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN)
COLUMNS = re.compile("documents=ndarray:int64 lengths=ndarray:int32 offsets=ndarray:int64 tokens=ndarray:uint(16|32)$")


def node_cache() -> Path:
    """Returns the folder that `data.cache=auto` means, on this node's own disk.

    Slurm's job scripts name a folder of their own in SSSCALE_SCRATCH and remove it at the end.
    """
    scratch = os.environ.get("SSSCALE_SCRATCH") or f"{tempfile.gettempdir()}/ssscale-{os.getuid()}"
    return Path(scratch) / "data"


class Place:
    """Where the files of a data folder lie: in `path` itself, or in `cache`, to which files are downloaded from `path`.

    limit: bytes of decompressed shards in the cache. Above it, the shards that were opened the longest ago are removed.
    Raises UserError if `path` is remote and there is no cache.
    """

    def __init__(self, path: str, cache: str | None, limit: int | None = None):
        self.path = path
        self.limit = limit
        self.is_remote = "://" in path or cache is not None
        if not self.is_remote:
            self.local = Path(path)
        elif cache is None:
            raise UserError(
                f"data.path={path} is remote: data.cache must name a local folder for it, or auto for this node's own disk"
            )
        else:
            # Each data set has its own folder, as several may share a cache.
            folder = node_cache() if cache == "auto" else Path(cache)
            self.local = folder / sha256(path.encode()).hexdigest()[:16]

    def fetch(self, name: str) -> Path:
        """Returns the local path of a file, after downloading it if needed. Raises UserError if the download fails.

        A file of a local folder need not exist.
        """
        file = self.local / name
        if file.is_file() or not self.is_remote:
            return file
        import_streaming()
        from streaming.base.storage import CloudDownloader

        with locked(file):
            if not file.is_file():
                temporary = f"{file}.{os.getpid()}.tmp"
                try:
                    CloudDownloader.direct_download(f"{self.path.rstrip('/')}/{name}", temporary)
                except Exception as error:  # each cloud's client raises errors of its own
                    raise UserError(f"cannot download {name} from {self.path}: {error}") from error
                os.rename(temporary, file)
        return file

    def check_limit(self, needed: int) -> None:
        """Raises UserError if the cache cannot hold `needed` bytes, the size of the shards that are read at the same time."""
        if self.is_remote and self.limit is not None and self.limit < needed:
            raise UserError(
                f"data.cache_gb={self.limit / 1e9:g} is too little for {self.path}: the shards that are shuffled together"
                f" take {needed / 1e9:.3g}"
            )

    def make_room(self, latest: Path) -> None:
        """Removes the shards that were opened the longest ago until the cache is within its limit, but never `latest`."""
        if not self.is_remote or self.limit is None:
            return
        found = []
        for file in self.local.rglob("*.mds"):
            with suppress(FileNotFoundError):  # another process may have removed it
                found.append((file.stat().st_mtime_ns, file.stat().st_size, file))
        total = sum(size for _, size, _ in found)
        for _, size, file in sorted(found):
            if total <= self.limit:
                return
            if file != latest:
                # The lock keeps other processes from mapping it now. Existing maps stay readable.
                with locked(file):
                    file.unlink(missing_ok=True)
                total -= size


class RowStore:
    """The rows of a source in one split, by index. A shard is opened when one of its rows is first read.

    folder: such as train/web, within the data folder. index_sha256: of its index.json, from the manifest.
    length: tokens of a row. vocab_size: of the tokenizer.
    Raises UserError if the index is missing, corrupt, does not have the expected form, or leads out of the data folder.
    """

    def __init__(self, place: Place, folder: str, index_sha256: str, length: int, vocab_size: int):
        import_streaming()
        from streaming import Stream
        from streaming.base.format import reader_from_json

        self.place = place
        self.length, self.vocab_size = length, vocab_size
        self.folder = place.local / folder
        self.is_remote = place.is_remote
        index = place.fetch(f"{folder}/{INDEX}")
        if not index.is_file():  # also a pipe, whose reader would wait
            raise UserError(f"{index} is missing")
        try:
            content = index.read_bytes()
        except OSError as error:
            raise UserError(f"{index} cannot be read: {error.strerror}") from error
        if sha256(content).hexdigest() != index_sha256:
            raise UserError(f"{index} is corrupt: its sha256 is not the manifest's")
        try:
            shards = json.loads(content)["shards"]
            found = bad_shard_name(shards)
            self._readers = [reader_from_json(str(self.folder), "", shard) for shard in shards if found is None]
            self.shard_rows = [int(reader.samples) for reader in self._readers]
            columns = {tuple(zip(reader.column_names, reader.column_encodings)) for reader in self._readers}
            for reader in self._readers:
                _check_info(reader)
        except (AssertionError, AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{index} does not have the form of an index: {error!r}") from error
        if found is not None:
            raise UserError(f"{index} cannot be trusted: {found}, which is not the name of a file in its folder")
        if leads_out(self.folder, place.local):  # shards are written beside the index
            raise UserError(f"{self.folder} is a link that leads out of the data folder: put its files in its place")
        if not all(COLUMNS.match(" ".join(f"{name}={encoding}" for name, encoding in found)) for found in columns):
            raise UserError(f"{index} does not have the columns of packed rows: {sorted(columns)}")
        self._dtypes = [np.dtype(encoding.partition(":")[2]) for _, encoding in next(iter(columns), ())]
        self._stream = Stream(
            remote=f"{place.path.rstrip('/')}/{folder}" if place.is_remote else None,
            local=str(self.folder),
            download_retry=2,
            download_timeout=600,
            validate_hash="xxh64",
            keep_zip=not place.is_remote,
        )
        # One shard more than a window, because a reader can enter a new window while another is still in the old one.
        self.working_set = sum(sorted(int(reader.raw_data.bytes) for reader in self._readers)[-WINDOW - 1 :])
        self._ends = np.cumsum(self.shard_rows)
        self._open: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def __len__(self) -> int:
        return sum(self.shard_rows)

    def shard_of(self, row: int) -> str:
        """Returns the file that holds a row, for messages."""
        return str(self.folder / self._zip(int(np.searchsorted(self._ends, row, side="right"))))

    def missing(self) -> str | None:
        """Returns a local shard that is missing or has the wrong size, or None. The contents are not read.

        Shards of a remote store are fetched when they are read, and other processes may be deleting some from the cache.
        """
        if self.is_remote:
            return None
        for number, reader in enumerate(self._readers):
            file = self.folder / self._zip(number)
            raw = self.folder / reader.raw_data.basename
            present = file.is_file() and file.stat().st_size == (reader.zip_data or reader.raw_data).bytes
            if not (present or raw.is_file()):
                return str(file)
        return None

    def __getitem__(self, row: int) -> Row:
        """Returns a row.

        Raises UserError, naming the shard, if the shard is missing or corrupt. Errors in TEMPORARY are raised as UserError
        after `retry_seconds`, and other OSErrors at once.
        """
        shard = int(np.searchsorted(self._ends, row, side="right"))
        if shard not in self._open:
            name = f"shard {self.folder / self._zip(shard)}"
            self._open[shard] = patiently(lambda: self._mapped(shard), name, TEMPORARY)
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        data, bounds = self._open[shard]
        index = row - int(self._ends[shard]) + self.shard_rows[shard]
        found = _decode(data[bounds[index] : bounds[index + 1]], self._dtypes)
        wrong = self._mistake(found)
        if wrong is not None:
            raise UserError(f"shard {self.shard_of(row)}: row {row} {wrong}")
        return found

    def _mistake(self, row: Row) -> str | None:
        """Returns what is wrong with a row that `data_prep` has not written, or None."""
        if len(row.tokens) != self.length:
            return f"has {len(row.tokens)} tokens, and rows have {self.length}"
        if not len(row.lengths) == len(row.documents) == len(row.offsets):
            return "has other numbers of lengths, documents and offsets"
        if len(row.lengths) == 0 or row.lengths.min() < 1 or row.lengths.sum(dtype=np.int64) != self.length:
            return (
                f"is divided into parts of {row.lengths[:4].tolist()} tokens and so on, which do not make {self.length}"
            )
        if row.tokens.max() >= self.vocab_size:
            return f"has token id {row.tokens.max()}, and its tokenizer has {self.vocab_size} entries"
        return None

    def _zip(self, shard: int) -> str:
        reader = self._readers[shard]
        return str((reader.zip_data or reader.raw_data).basename)

    def _mapped(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the decompressed shard as uint8, and the [samples + 1] uint32 offsets at which its samples begin and end.

        Raises UserError if the shard is missing or corrupt, and OSError for errors in TEMPORARY and of the cache.
        """
        reader = self._readers[shard]
        raw = self.folder / reader.raw_data.basename
        for file in (_lock(raw), raw.with_name(f"{raw.name}.tmp")):
            if file.is_symlink():  # both files are written, and writing follows links
                raise UserError(f"{file} is a link: remove it, as writing would follow it")
        # Another rank or worker may be writing the same file under the same temporary name.
        with locked(raw):
            data = _map(raw)
            fresh = data is None or not _is_whole(data, reader.raw_data)
            if fresh:
                raw.unlink(missing_ok=True)
                self._decompress(shard)
                data = _map(raw)
            elif self.place.limit is not None:
                os.utime(raw)
        if fresh:
            self.place.make_room(raw)
        if data is None or not _is_whole(data, reader.raw_data):
            raise UserError(f"shard {self.folder / self._zip(shard)} is corrupt: its hash does not match")
        data = np.asarray(data)  # slices of a plain array are faster than slices of a memmap
        count = int(data[:4].view(np.uint32)[0])
        return data, data[4 : 4 * (count + 2)].view(np.uint32)

    def _decompress(self, shard: int) -> None:
        file = self.folder / self._zip(shard)
        if not self.is_remote and not file.is_file():
            raise UserError(f"shard {file} is missing")
        try:
            self._stream.prepare_shard(self._readers[shard])
        except OSError as error:
            if error.errno in TEMPORARY:
                raise
            if error.errno not in UNWRITABLE:
                raise self._corrupt(file, error) from error
            raw = self.folder / self._readers[shard].raw_data.basename
            raw.with_name(f"{raw.name}.tmp").unlink(missing_ok=True)
            raise UserError(
                f"shard {file} cannot be decompressed beside it ({error.strerror}): make room, or name a folder in data.cache"
            ) from error
        except Exception as error:  # ValueError for a wrong checksum, or an error of a cloud's client
            raise self._corrupt(file, error) from error

    def _corrupt(self, file: Path, error: Exception) -> UserError:
        if self.is_remote:
            file.unlink(missing_ok=True)  # so that the next start downloads it again
        return UserError(f"shard {file} is missing or corrupt: {error}")


def locked(file: Path) -> FileLock:
    """Returns a lock for a file among the processes of this node. The kernel releases it if its holder dies.

    Raises UserError if the lock file cannot be created, and OSError for errors in TEMPORARY.
    """
    lock = _lock(file)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        if error.errno in TEMPORARY:
            raise
        raise UserError(
            f"cannot write beside {file} ({error.strerror}): data.cache must name a folder for it"
        ) from error
    return FileLock(lock)


def _lock(file: Path) -> Path:
    return file.with_name(f".{file.name}.lock")


def _decode(sample: np.ndarray, dtypes: Sequence[np.dtype]) -> Row:
    """Returns the arrays of a sample without copying them, four times as fast as MDSReader.

    A sample is the sizes of its columns (uint32), then the columns. A column is a byte 1 << 2 | w, the length of the array
    in 2^w bytes, and its values.
    """
    at = 4 * len(dtypes)
    arrays = []
    for size, dtype in zip(sample[:at].view(np.uint32).tolist(), dtypes):
        start = at + 1 + (1 << (int(sample[at]) & 3))
        at += size
        arrays.append(sample[start:at].view(dtype))
    documents, lengths, offsets, tokens = arrays
    return Row(tokens, lengths, documents, offsets)


def _map(file: Path) -> np.ndarray | None:
    try:
        return np.memmap(file, np.uint8, "r") if file.stat().st_size else None
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in TEMPORARY:
            raise
        raise UserError(f"shard {file} cannot be read: {error.strerror}") from error


def _check_info(reader: Any) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError if an entry of an index lacks what reading needs."""
    for info in filter(None, (reader.raw_data, reader.zip_data)):
        if type(info.bytes) is not int or info.bytes < 0:
            raise ValueError(f"bytes={info.bytes!r}")
    if int(reader.samples) < 0:
        raise ValueError(f"samples={reader.samples!r}")
    if not isinstance(reader.raw_data.hashes["xxh64"], str):
        raise TypeError(f"hashes={reader.raw_data.hashes!r}")


def _is_whole(data: np.ndarray, info: Any) -> bool:
    # A killed run or a full disk may have left an incomplete file.
    return len(data) == info.bytes and xxhash.xxh64(data.data).hexdigest() == info.hashes["xxh64"]
