"""Run the stages of one worker, a batch at a time, with ``torch.distributed.pipelining`` over gloo.

    order (ours, data) ──> _PipelineScheduleRuntime: adds sends and receives, runs actions one after the other
                                │ forward_one_chunk, backward_one_chunk, backward_weight_one_chunk
                           _Stage (a PipelineStage): records activities, releases buffers
                                │
                           StageModule

torch keeps a buffer for every microbatch of a batch at every cut (for neighbouring stages on one worker the
activations themselves), and sent tensors until the end of the batch, so 1F1B would hold as much at the cuts
as GPipe does. ``_Stage`` allocates a buffer when a receive is posted, drops it when it has been read, and
sends through ``Sends``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from pipeedge.base.errors import PeerFailedError, PipeEdgeError, one_line
from pipeedge.base.heap import return_freed_memory
from pipeedge.base.payload import Payload, TensorSpec
from pipeedge.observe.timeline import ThreadState
from pipeedge.train.batchlinear import BatchLinear
from pipeedge.train.networks import StageModule
from pipeedge.train.orders import Order
from pipeedge.train.sends import Sends

__all__ = ["Engine", "Watch"]

# torch has no types here, and no public name for the runtime that runs a custom order.
_Runtime: Any = _PipelineScheduleRuntime
_CPU = torch.device("cpu")


class Watch:
    """Observer of the engine; this one ignores everything."""

    def doing(self, what: ThreadState, stage: int, microbatch: int | None) -> AbstractContextManager[None]:
        """Record that ``what`` is done to ``microbatch`` in ``stage`` while the context lasts."""
        del what, stage, microbatch
        return _nothing()

    def sent(self, worker: int) -> None:
        """Record that a payload was handed to the link to ``worker``."""

    def received(self, worker: int) -> None:
        """Record that a payload has arrived from ``worker``."""


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Stage(PipelineStage):
    """A stage that records its activities and releases buffers early."""

    def __init__(
        self,
        module: StageModule,
        stage: int,
        order: Order,
        crossing: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]],
        watch: Watch,
        microbatch_size: int,
    ) -> None:
        before, after = crossing
        super().__init__(
            module,
            stage,
            order.stages,
            _CPU,
            input_args=_empty_tensors(before, stage > 0),
            output_args=_empty_tensors(after, True),
        )
        self._module = module
        self._placement = order.placement
        self._watch = watch
        self._microbatch_size = microbatch_size
        self.first_item = 0
        self.sends: Sends | None = None
        """Sends of the batch that is running."""

    # -- computing --------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.stage_index and self._is_remote(self.stage_index - 1):
            self._watch.received(self._placement[self.stage_index - 1])
        self._module.position.item = self.first_item + fwd_chunk_id * self._microbatch_size
        with self._work(ThreadState.FORWARD, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = None
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if not self.is_last and self._is_remote(self.stage_index + 1):
            self._watch.received(self._placement[self.stage_index + 1])
        with self._work(ThreadState.BACKWARD, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for info in self.grad_recv_info[bwd_chunk_id]:
            info.buffer = None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._work(ThreadState.BACKWARD, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    @contextmanager
    def _work(self, what: ThreadState, microbatch: int) -> Iterator[None]:
        with self._watch.doing(what, self.stage_index, microbatch):
            try:
                yield
            except Exception as error:
                cause = error.__cause__ or error
                raise PipeEdgeError(
                    f"stage {self.stage_index}, {what.value} of microbatch {microbatch}: {one_line(cause)}"
                ) from error

    # -- sending and receiving --------------------------------------------------------------------

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(*args, **kwargs)
        _drop_buffers(self.args_recv_info)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        _drop_buffers(self.grad_recv_info)
        return result

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _make_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _make_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(self.stage_index + 1, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(self.stage_index - 1, super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, stage: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Send, and return the operations that remain for torch's runtime: none."""
        self._watch.sent(self._placement[stage])
        if self.sends is None:
            return operations
        self.sends.post(operations)
        return []

    def _is_remote(self, stage: int) -> bool:
        return self._placement[stage] != self._placement[self.stage_index]


def _drop_buffers(infos: Mapping[int, Sequence[Any]]) -> None:
    """Drop the buffers that torch allocated for all microbatches before the first batch."""
    for of_microbatch in infos.values():
        for info in of_microbatch:
            info.buffer = None


def _make_buffers(infos: Sequence[Any]) -> None:
    for info in infos:
        meta = info.tensor_meta
        if meta is not None and info.buffer is None:
            info.buffer = torch.empty(meta.shape, dtype=meta.dtype)


def _empty_tensors(specs: tuple[TensorSpec, ...], needs_gradient: bool) -> tuple[torch.Tensor, ...]:
    return tuple(spec.empty().requires_grad_(needs_gradient) for spec in specs)


@dataclass(frozen=True)
class BatchSize:
    """Size of a batch."""

    microbatches: int
    """Number of microbatches in a batch."""
    microbatch_size: int
    """Number of items in a microbatch."""

    @property
    def items(self) -> int:
        """Number of items in a batch."""
        return self.microbatches * self.microbatch_size


class Engine:
    """Runs the stages of this worker. The process group must exist, with worker n as its rank n.

    Args:
        order: Actions of all workers.
        worker: Number of this worker.
        modules: Stages of this worker, by number.
        crossing: Tensors of a microbatch at each cut, ``order.stages + 1`` entries.
        size: Size of a batch.
        watch: Observer of the activities.
    """

    def __init__(
        self,
        order: Order,
        worker: int,
        modules: Mapping[int, StageModule],
        crossing: Sequence[tuple[TensorSpec, ...]],
        size: BatchSize,
        watch: Watch | None = None,
    ) -> None:
        self._order = order
        self._worker = worker
        self._modules = dict(modules)
        self._crossing = crossing
        self._batch_size = size.items
        watch = Watch() if watch is None else watch
        self._stages = [
            _Stage(module, stage, order, (crossing[stage], crossing[stage + 1]), watch, size.microbatch_size)
            for stage, module in sorted(self._modules.items())
        ]
        self._wide = [
            (stage, part)
            for stage, module in sorted(self._modules.items())
            for part in module.modules()
            if isinstance(part, BatchLinear)
        ]
        for _, part in self._wide:
            part.expect(size.microbatches)
        self._watch = watch
        self._runtime: Any = _Runtime(self._stages, size.microbatches, loss_fn=self._loss, scale_grads=False)
        self._runtime.pipeline_order = {
            worker: [_Action.from_str(str(action)) for action in actions]
            for worker, actions in enumerate(order.actions)
        }
        self._runtime._prepare_schedule_with_comms(self._runtime.pipeline_order)

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of this worker's stages, by their names in the whole network."""
        return {
            name: parameter
            for module in self._modules.values()
            for name, parameter in module.named_parameters()
        }

    @property
    def has_first(self) -> bool:
        """Whether this worker has the first stage, which takes the images."""
        return 0 in self._modules

    @property
    def has_last(self) -> bool:
        """Whether this worker has the last stage, which computes the loss."""
        return self._order.stages - 1 in self._modules

    def batch(
        self, first_item: int, images: torch.Tensor | None, labels: torch.Tensor | None
    ) -> float | None:
        """Run the forward and backward passes of a batch.

        Gradients are added to the existing ones, except those that ``late_gradients`` computes.

        Args:
            first_item: Number of its first item, counted from the beginning of the run.
            images: [batch, channels, height, width] on the worker with the first stage.
            labels: [batch] on the worker with the last stage.

        Returns:
            The mean cross-entropy loss over the batch on the worker with the last stage, else None.

        Raises:
            PipeEdgeError: A stage failed.
            PeerFailedError: A link failed.
        """
        losses: list[torch.Tensor] = []
        given: dict[str, Any] = {"target": labels, "losses": losses} if self.has_last else {}
        arguments = () if images is None else (images,)
        with self._links(), Sends() as sends:
            for stage in self._stages:
                stage.first_item, stage.sends = first_item, sends
            self._runtime.step(*arguments, return_outputs=False, **given)
        return float(torch.stack([loss.detach() for loss in losses]).sum()) if losses else None

    def late_gradients(self) -> Iterator[None]:
        """Compute the gradients that ``batch`` deferred, a layer at a time.

        A caller that updates a layer's weights and drops its gradient before the next step never holds two
        of them, and none while there are activations.
        """
        due = [(stage, part) for stage, part in self._wide if part.is_due]
        if not due:
            return
        # Such a gradient does not fit into the memory that the batch has freed, and would come on top of it;
        # nor would the next batch reuse the same memory.
        return_freed_memory()
        for stage, part in due:
            with self._watch.doing(ThreadState.BACKWARD, stage, None):
                part.finish()
            yield
        return_freed_memory()

    def correct(self, images: torch.Tensor, labels: torch.Tensor) -> int:
        """Return how many of ``images`` are classified correctly on the last stage's worker, 0 on others.

        The images pass through the stages in one piece, without dropout.
        """
        payload: Payload = (images,)
        where: Callable[[int], int] = self._order.placement.__getitem__
        with torch.no_grad(), self._links():
            for stage in range(self._order.stages):
                if where(stage) == self._worker:
                    if stage and where(stage - 1) != self._worker:
                        payload = self._receive(stage, len(images))
                    payload = self._evaluate(stage, payload)
                elif stage and where(stage - 1) == self._worker:
                    for tensor in payload:
                        dist.send(tensor.contiguous(), where(stage))
        return int((payload[0].argmax(dim=1) == labels).sum()) if self.has_last else 0

    def wait_for_all(self) -> None:
        """Wait until every worker has arrived here."""
        with self._links():
            dist.barrier()

    def _receive(self, stage: int, items: int) -> Payload:
        payload = tuple(
            torch.empty(items, *spec.shape[1:], dtype=spec.dtype) for spec in self._crossing[stage]
        )
        for tensor in payload:
            dist.recv(tensor, self._order.placement[stage - 1])
        return payload

    def _evaluate(self, stage: int, payload: Payload) -> Payload:
        module = self._modules[stage].eval()
        result = module(*payload)
        module.train()
        return result if isinstance(result, tuple) else (result,)

    def _loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return a microbatch's part of the mean loss over the batch."""
        return F.cross_entropy(output, labels, reduction="sum") / self._batch_size

    @contextmanager
    def _links(self) -> Iterator[None]:
        """Convert gloo's error about a lost peer into ours; the hub finds out which peer it was."""
        try:
            yield
        except PipeEdgeError:
            raise
        except RuntimeError as error:
            neighbour = next((place for place in self._order.placement if place != self._worker), None)
            raise PeerFailedError(
                f"a link between workers failed: {one_line(error)}", peer=neighbour
            ) from error
