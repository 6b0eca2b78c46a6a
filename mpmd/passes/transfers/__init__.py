"""Passes over transfers, and over the signatures of functions."""

from __future__ import annotations

from mpmd.passes.transfers.combine_before_transfer import CombineBeforeTransfer
from mpmd.passes.transfers.forget_carried_starts import ForgetCarriedStarts
from mpmd.passes.transfers.merge_transfers import MergeTransfers
from mpmd.passes.transfers.move_transfers_to_producer import MoveTransfersToProducer
from mpmd.passes.transfers.remove_transfer_cycles import RemoveTransferCycles
from mpmd.passes.transfers.uniquify_carried_values import UniquifyCarriedValues
from mpmd.passes.transfers.uniquify_function_inputs_outputs import UniquifyFunctionInputsOutputs
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())
