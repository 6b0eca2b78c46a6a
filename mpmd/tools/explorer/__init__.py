"""A page that steps through a run of passes: the changes of the text, and the fragments by mesh."""

from typing import TYPE_CHECKING, Any

from mpmd.tools.explorer.recorder import PassRecorder, PipelinePass

if TYPE_CHECKING:
    from mpmd.tools.explorer.explore_step import explore as explore

__all__ = ["PassRecorder", "PipelinePass", "explore"]


def __getattr__(name: str) -> Any:
    """`explore` imports the compiler, which the recorder of `mpmd-opt` does without: on first access."""
    if name == "explore":
        from mpmd.tools.explorer.explore_step import explore

        return explore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
