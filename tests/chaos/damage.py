"""Ways to damage one file. Each takes the file and a random generator and changes what lies there."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

Way = Callable[[Path, random.Random], None]


def flip_a_bit(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut_short(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(1, len(data))])


def make_empty(file: Path, rng: random.Random) -> None:
    file.write_bytes(b"")


def remove(file: Path, rng: random.Random) -> None:
    file.unlink()


def scramble(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.randbytes(rng.randrange(1, 2 * file.stat().st_size)))


def zero_a_block(file: Path, rng: random.Random) -> None:
    """As a crash leaves a file whose size had reached the disk and whose blocks had not."""
    data = bytearray(file.read_bytes())
    start = rng.randrange(len(data))
    end = rng.randrange(start, len(data)) + 1
    data[start:end] = bytes(end - start)
    file.write_bytes(data)


def append(file: Path, rng: random.Random) -> None:
    with open(file, "ab") as opened:
        opened.write(rng.randbytes(rng.randrange(1, 100)))


def repeat_a_part(file: Path, rng: random.Random) -> None:
    """As after an interrupted copy that was continued at the wrong place."""
    data = file.read_bytes()
    start = rng.randrange(len(data))
    end = rng.randrange(start, len(data)) + 1
    file.write_bytes(data[:end] + data[start:])


def put_a_folder_there(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


WAYS: dict[str, Way] = {
    "a bit is flipped": flip_a_bit,
    "cut short": cut_short,
    "empty": make_empty,
    "gone": remove,
    "random bytes": scramble,
    "a block of zeros": zero_a_block,
    "something is appended": append,
    "a part is there twice": repeat_a_part,
    "a folder of its name": put_a_folder_there,
}


def any_way(file: Path, rng: random.Random) -> str:
    """Damage the file in one of the ways; returns which."""
    name = rng.choice(list(WAYS))
    WAYS[name](file, rng)
    return name


def file_of(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Every file with its content, every link with its target, every folder."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        else:
            found[name] = "folder" if path.is_dir() else path.read_bytes()
    return found


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
