"""Party: rows that go through the kernels together, and what is said of them for each token.

The heads of its rows stay packed from token to token; what moved since is written into them. It trusts that
its rows are those it was made of, unchanged but for longer texts: whether they are is the desk's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling_layout import HEADER_OFFSETS, HEADER_WORDS
from .gpu_kernels import KernelOutput, SamplingKernels, SamplingLaunchKey
from .header_writers import (
    CountedRow,
    DecayWriter,
    HistoryRow,
    HistoryWriter,
    MaskWriter,
    MuWriter,
    PenaltyWriter,
    RowHeaders,
)
from .kernel_params import SamplingKernelVariant, param_table
from .output_buffers import OutputBuffer
from .request import SamplingRequest
from .row_params import RowParams, RowParamsBuilder
from .staging_ring import StagingRing

POSITION_OFFSET, BLOCKED_OFFSET = HEADER_OFFSETS["seed"] + 1, HEADER_OFFSETS["blocked"]


class KernelGroup:
    """Some rows of a batch, all in one lane."""

    def __init__(
        self,
        variant: SamplingKernelVariant,
        num_top: int,
        batch_indices: list[int],
        requests: Sequence[SamplingRequest],
        row_params: Sequence[RowParams],
        builder: RowParamsBuilder,
    ) -> None:
        """Rows with the places of their logits, and their seats; `wanted` top tokens are asked for."""
        self.batch_indices = batch_indices
        self._row_params = row_params  # what their words point to must live
        count = len(requests)
        blocked = [token for params in row_params for token in params.blocked_ids]
        self._packed = np.empty(count * HEADER_WORDS + len(blocked), np.int64)
        self._headers = headers = self._packed[: count * HEADER_WORDS].reshape(count, HEADER_WORDS)
        headers.reshape(-1)[:] = np.frombuffer(b"".join([params.header for params in row_params]), np.int64)
        headers[:, HEADER_OFFSETS["batch_index"]] = batch_indices
        self._packed[count * HEADER_WORDS :] = blocked
        headers[:, BLOCKED_OFFSET + 1] = counts = np.array([len(params.blocked_ids) for params in row_params])
        headers[:, BLOCKED_OFFSET] = count * HEADER_WORDS + counts.cumsum() - counts
        self._param_table = param_table(tuple([params.compiled for params in row_params]), builder.device)
        edits_logits, updates_mu = (
            any([params.edits_logits for params in row_params]),
            any([params.compiled.mirostat for params in row_params]),
        )
        uses_dry = any([params.token_history is not None for params in row_params])
        self._launch_key = SamplingLaunchKey(count, variant, num_top, edits_logits, updates_mu, uses_dry)
        self._states = [row.state for row in requests]
        self._histories = [row.state.history if row.history is None else row.history for row in requests]
        self._next_positions: list[int] = []
        self._create_writers(requests, row_params, builder)

    def _create_writers(
        self, requests: Sequence[SamplingRequest], row_params: Sequence[RowParams], builder: RowParamsBuilder
    ) -> None:
        """What writes the features that the rows use."""
        headers, members = RowHeaders(self._headers, len(self._packed)), list(enumerate(row_params))
        counted = [
            CountedRow(i, params.token_counts, requests[i].state.history)
            for i, params in members
            if params.token_counts is not None
        ]
        decaying = [
            (i, requests[i].state, params.compiled.penalty_rule)
            for i, params in members
            if params.compiled.penalty_rule is not None and params.token_counts is None
        ]
        with_history = [
            HistoryRow(i, params.token_history, requests[i].state.history)
            for i, params in members
            if params.token_history is not None
        ]
        with_mirostat = [(i, requests[i].state) for i, params in members if params.compiled.mirostat]
        self._mask_writer = MaskWriter(headers, requests, builder.width)
        self._penalty_writer = PenaltyWriter(headers, counted) if counted else None
        self._decay_writer = DecayWriter(headers, decaying) if decaying else None
        self._history_writer = HistoryWriter(headers, with_history) if with_history else None
        self._mu_writer = MuWriter(headers, with_mirostat, builder.device) if with_mirostat else None

    def launch(
        self,
        x: Tensor,
        kernels: SamplingKernels,
        staging_ring: StagingRing,
        has_masks: bool,
        output: OutputBuffer,
    ) -> KernelOutput:
        """Have a token written for each row, from logits of the whole batch; `masked` if any has a mask."""
        positions = list(map(len, self._histories))
        grew_by_one = positions == self._next_positions
        if not grew_by_one:
            self._headers[:, POSITION_OFFSET] = positions
        extra = array("q")
        if self._penalty_writer is not None:
            self._penalty_writer.write(grew_by_one, extra)
        if self._decay_writer is not None:
            self._decay_writer.write(extra)
        if self._history_writer is not None:
            self._history_writer.write(grew_by_one)
        key = self._launch_key
        if self._mask_writer.write(has_masks, extra) and not key.edits_logits:
            key = key._replace(edits_logits=True)
        if self._mu_writer is not None:
            self._mu_writer.write(grew_by_one, positions)
        kernel_output = kernels.draw(
            x, self._param_table, staging_ring.upload(self._packed, extra), key, output
        )
        self._after_launch(positions, kernel_output.mus)
        return kernel_output

    def select_own(self, values: Tensor) -> Tensor:
        """The rows' own of what is known of the whole batch."""
        return values[torch.tensor(self.batch_indices).to(values.device, non_blocking=True)]

    def _after_launch(self, positions: list[int], mus: Tensor) -> None:
        """Make ready for the next tokens, now that the device has enough to do."""
        self._headers[:, POSITION_OFFSET] += 1
        self._next_positions = [position + 1 for position in positions]
        if self._penalty_writer is not None:
            self._penalty_writer.after_send()
        if self._history_writer is not None:
            self._history_writer.after_send()
        if self._mu_writer is not None:
            self._mu_writer.after_send(positions, mus)
        for state, position in zip(self._states, positions, strict=True):
            if position > state.last_drawn_position:
                state.last_drawn_position = position
