"""A progress bar with tokens/s and the time left. It is silent unless stderr is a terminal."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Counts bytes, whose total is known, for the time left, and tokens for the speed."""

    def __init__(self) -> None:
        console = Console(stderr=True, markup=False, emoji=False)
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %  {task.fields[tokens]:,} tokens  {task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._tokens = 0

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def start(self, description: str, total_bytes: int) -> None:
        """Replaces the current bar by a new one."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._tokens = 0
        self._task = self._bar.add_task(description, total=total_bytes, tokens=0, speed=0.0)

    def advance(self, num_bytes: int, num_tokens: int = 0) -> None:
        assert self._task is not None
        self._tokens += num_tokens
        elapsed = self._bar.tasks[-1].elapsed or 0.0
        speed = self._tokens / elapsed if elapsed else 0.0
        self._bar.update(self._task, advance=num_bytes, tokens=self._tokens, speed=speed)
