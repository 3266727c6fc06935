"""Sampling on the native CPU kernels."""

from ctypes import byref

import numpy as np
import numpy.typing as npt
import torch

from treadle.backends.cpu.library import DrawsStruct, Library, PenaltiesStruct, ReportsStruct, pointer
from treadle.backends.inputs import Rows
from treadle.core.request import IntArray
from treadle.scheduler.plan import TokenLogprobs


class NativeSampling:
    """SamplingKernels in C++.

    Args:
        library: the kernels.
        threads: number of threads.
    """

    def __init__(self, library: Library, threads: int) -> None:
        self._dll = library.dll
        self._threads = threads

    def draw(
        self,
        values: torch.Tensor,
        place: IntArray,
        table: Rows,
        rows: IntArray,
        noise: npt.NDArray[np.float64],
    ) -> IntArray:
        """A token for each entry: int32 [n]."""
        sampling = table.sampling
        token_ids = np.empty(len(rows), dtype=np.int32)
        arrays = (
            values.numpy(), place, sampling.temperature[rows], sampling.top_p[rows], sampling.min_p[rows],
            sampling.top_k[rows], noise, sampling.is_greedy[rows], token_ids,
        )  # fmt: skip
        self._dll.treadle_draw(byref(DrawsStruct(*map(pointer, arrays), len(rows), values.shape[1], self._threads)))
        return token_ids

    def report(
        self, values: torch.Tensor, place: IntArray, token_ids: IntArray, num_top: IntArray
    ) -> list[TokenLogprobs]:
        """Log-probability and rank of a token, and the most likely ones, for each entry."""
        count, most = len(place), int(num_top.max(initial=0))
        logprobs, ranks = np.empty(count, dtype=np.float32), np.empty(count, dtype=np.int32)
        top_ids, top_logprobs = np.empty((count, most), dtype=np.int32), np.empty((count, most), dtype=np.float32)
        arrays = (values.numpy(), place, token_ids, num_top, logprobs, ranks, top_ids, top_logprobs)
        self._dll.treadle_report(
            byref(ReportsStruct(*map(pointer, arrays), count, most, values.shape[1], self._threads))
        )
        columns = (token_ids, logprobs, ranks, num_top, top_ids, top_logprobs)
        return [
            TokenLogprobs(token_id, logprob, rank, tuple(ids[:n]), tuple(top[:n]))
            for token_id, logprob, rank, n, ids, top in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def penalize(self, values: torch.Tensor, place: IntArray, table: Rows, rows: IntArray) -> None:
        """Apply the rows' penalties to their logits, in place."""
        sampling = table.sampling
        arrays = (
            values.numpy(), place, rows, table.token_ids, table.num_tokens[rows], table.num_prompt_tokens[rows],
            sampling.repetition_penalty[rows], sampling.presence_penalty[rows], sampling.frequency_penalty[rows],
        )  # fmt: skip
        self._dll.treadle_penalize(
            byref(
                PenaltiesStruct(
                    *map(pointer, arrays), table.token_ids.shape[1], len(rows), values.shape[1], self._threads
                )
            )
        )
