"""Export: attributes for the runtime, and one function per distinct fragment."""

from __future__ import annotations

from mpmd.passes.export.delay_inferred_fragments import DelayInferredFragments
from mpmd.passes.export.delay_transfers_from_cpu import DelayTransfersFromCpu
from mpmd.passes.export.lower_to_fragment_calls import LowerToFragmentCalls
from mpmd.passes.export.mark_aliasing_and_donation import MarkAliasingAndDonation
from mpmd.passes.export.mark_fragment_reserved_memory import MarkFragmentReservedMemory
from mpmd.passes.export.mark_input_output_with_layouts import MarkInputOutputWithLayouts
from mpmd.passes.export.mark_offloaded_input_output import MarkOffloadedInputOutput
from mpmd.passes.export.sink_create_token_into_fragments import SinkCreateTokenIntoFragments
from mpmd.passes.export.validate_no_backward_deps import ValidateNoBackwardDeps
from mpmd.passes.export.validate_no_inferred_fragments import ValidateNoInferredFragments
from mpmd.passes.export.validate_no_param_transfers import ValidateNoParamTransfers
from mpmd.passes.export.validate_no_reshards import ValidateNoReshards
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())
