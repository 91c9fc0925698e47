"""`kill -9` while a folder is exported or imported: the same command makes it, and nothing has to be removed by hand."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch.export import main as export_main
from launch.import_hf import main as import_main
from ssscale.errors import UserError
from ssscale.hf import convert
from ssscale.hf.building import MARK, building
from ssscale.parallel.groups import Groups
from tests.hf.jobs import write_checkpoint
from tests.models import make_model
from tests.train.commands import run_command

MODEL = make_model("softmax")


def kill_after(name: str) -> None:
    """To plant: the process is killed after a function of the conversion has written its files."""
    original = getattr(convert, name)

    def dying(*arguments: Any, **more: Any) -> None:
        original(*arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(convert, name, dying)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture
def folders(groups: Groups, tokenizer_file: Path, tmp_path: Path) -> Path:
    """A folder with a run, and its export `hf`."""
    write_checkpoint(MODEL, groups, tmp_path / "run", tokenizer_file)
    export_main([f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'hf'}"])
    return tmp_path


@pytest.mark.parametrize("name", ["_write_weights", "write_tokenizer"])
def test_an_export_is_made_by_the_same_command(name: str, folders: Path) -> None:
    arguments = [f"checkpoint={folders / 'run'}", f"out={folders / 'again'}"]
    code, _ = run_command("launch.export", arguments, folders / "log", partial(kill_after, name))
    assert code == -signal.SIGKILL
    assert not (folders / "again").exists()
    assert list((folders / "again.partial").glob("*.safetensors"))
    (folders / "again.partial" / "of_another_form.py").touch()
    export_main(arguments)
    assert contents(folders / "again") == contents(folders / "hf")
    assert not (folders / "again.partial").exists()


def test_an_import_is_made_by_the_same_command(folders: Path) -> None:
    arguments = [f"from={folders / 'hf'}", f"out={folders / 'back'}"]
    code, _ = run_command("launch.import_hf", arguments, folders / "log", partial(kill_after, "save_checkpoint"))
    assert code == -signal.SIGKILL
    assert not (folders / "back").exists()
    import_main(arguments)
    assert {path.name for path in (folders / "back").iterdir()} == {"checkpoints", "config.yaml"}
    assert not (folders / "back.partial").exists()
    export_main([f"checkpoint={folders / 'back'}", f"out={folders / 'again'}"])
    assert contents(folders / "again")["model.safetensors"] == contents(folders / "hf")["model.safetensors"]


def test_what_others_have_there_stays(folders: Path) -> None:
    """A whole folder, one that happens to have the temporary name, a link, and one that another process builds."""
    before = contents(folders / "hf")
    with pytest.raises(UserError, match="exists and is not empty"):
        export_main([f"checkpoint={folders / 'run'}", f"out={folders / 'hf'}"])
    (folders / "hf").rename(folders / "new.partial")
    (folders / "other.partial").symlink_to(folders / "new.partial")
    for out in ("new", "other"):
        with pytest.raises(UserError, match=rf"is built in \S+/{out}\.partial, which exists and is something else"):
            export_main([f"checkpoint={folders / 'run'}", f"out={folders / out}"])
    assert contents(folders / "new.partial") == before
    with building(folders / "busy") as folder:
        (folder / "file").touch()
        with pytest.raises(UserError, match="busy is being written by another process"):
            export_main([f"checkpoint={folders / 'run'}", f"out={folders / 'busy'}"])
    assert [path.name for path in (folders / "busy").iterdir()] == ["file"]


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with building(tmp_path / "link") as folder:
        assert (folder / MARK).is_file()
        (folder / "file").touch()
    assert [path.name for path in (tmp_path / "link").iterdir()] == ["file"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link"]
