"""Pipeline schedules: the order of tasks on every mesh, its proof, its prediction and its picture."""

from mpmd.scheduling.catalogue import (
    SCHEDULES,
    PipelineSchedule,
    ScheduleTable,
    from_csv,
    from_function,
    from_table,
    get_schedule,
)
from mpmd.scheduling.chrome_trace import chrome_trace
from mpmd.scheduling.definition import PipelineShape
from mpmd.scheduling.render import render_text
from mpmd.scheduling.render_html import render_html
from mpmd.scheduling.render_svg import render_svg
from mpmd.scheduling.search import SchedulingProblem, SearchResult, search
from mpmd.scheduling.simulate import peak_activations, simulate
from mpmd.scheduling.table import Phase, Task
from mpmd.scheduling.task_costs import Costs, Link, Skip, StageCosts
from mpmd.scheduling.timeline import MemoryCurve, Span, Timeline
from mpmd.scheduling.validate import linearize, validate
