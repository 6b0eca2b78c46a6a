"""A page that steps through a run of passes: the changes of the text, and the fragments by mesh."""

from mpmd.tools.explorer.explore import explore
from mpmd.tools.explorer.recorder import PassRecorder, Planned
