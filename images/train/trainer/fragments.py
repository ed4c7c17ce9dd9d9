"""What an engine trains, in pieces: of each parameter the stretch that this rank holds, as DeepSpeed keeps it.

A piece is a parameter's float32 weights and both of Adam's moments from some element on, flattened. Together the ranks
hold each element once, whatever the ZeRO stage; so a state that was saved by some ranks is read by any number of them.
Where tensor parallelism cuts a parameter, a window says where in it the elements of a rank's shard lie.
The tensors are the engine's own memory: what is written to them is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHT, *MOMENTS)


class Window(NamedTuple):
    """A shard of a flattened parameter: of each `of` elements the `width` from `first` on."""

    first: int
    width: int
    of: int

    def places(self, start: int, size: int) -> Tensor:
        """Where the shard's elements start to start + size are in the parameter, ascending."""
        at = torch.arange(start, start + size)
        return at // self.width * self.of + self.first + at % self.width


@dataclass(frozen=True)
class Fragment:
    """Elements start to start + len of a flattened parameter, or of a shard of it where there is a window.

    `tensors` has one of each kind, of one length.
    """

    name: str
    start: int
    tensors: dict[str, Tensor]
    window: Window | None = None

    def __len__(self) -> int:
        return len(self.tensors[WEIGHT])

    def seen(self, window: Window, numel: int) -> Fragment:
        """The same of a shard of `numel` elements that lies so in its parameter."""
        if window.width == numel:  # all in one stretch
            return replace(self, start=self.start + window.first)
        return replace(self, window=window)


def of(engine: Any, stage: int, rank: int) -> Iterator[Fragment]:
    """The pieces of this rank; of an engine that has taken a step, or was made ready (`prepare`)."""
    trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    if stage == 0:
        yield from _whole(engine, trained) if rank == 0 else ()
    elif stage < 3:
        yield from _of_partition(trained)
    else:
        yield from _of_partitioned_weights(engine.optimizer, trained, rank)


def prepare(engine: Any, stage: int, steps: int) -> None:
    """Give an engine that has taken no step the optimizer state of one that has taken so many, all moments 0."""
    optimizer = engine.optimizer
    if stage == 0:
        inner, held = optimizer, [p for group in optimizer.param_groups for p in group["params"]]
    elif stage < 3:
        inner, held = optimizer.optimizer, list(optimizer.single_partition_of_fp32_groups)
    else:
        inner, held = optimizer.optimizer, list(optimizer.fp32_partitioned_groups_flat)
    for one in held:
        moments = {kind: torch.zeros_like(one, memory_format=torch.preserve_format) for kind in MOMENTS}
        # Where the fused optimizer looks for it: beside what it counts for.
        inner.state[one] = {"step": torch.tensor(float(steps), dtype=torch.float32, device=one.device), **moments}
    if stage in (1, 2):
        optimizer._lazy_init_hp_params_optimizer_state()


def is_fresh(engine: Any, stage: int) -> bool:
    """Whether an engine's optimizer has no state yet: it has taken no step, and was not made ready."""
    return not (engine.optimizer if stage == 0 else engine.optimizer.optimizer).state


def settle(engine: Any, stage: int, pieces: Sequence[Fragment], whole: Callable[[str, int], Tensor]) -> None:
    """Let the weights that are computed with follow the pieces that were filled; `whole` gives all of a parameter."""
    trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    if stage in (1, 2):
        for name, parameter in trained:
            parameter.data.copy_(whole(name, parameter.numel()).view_as(parameter))
    elif stage == 3:
        engine.optimizer.checkpoint_event_prologue()  # partitions those that are kept whole because they are small
        by_name = dict(trained)
        for one in pieces:
            by_name[one.name].ds_tensor.data[: len(one)].copy_(one.tensors[WEIGHT])
        engine.optimizer.checkpoint_event_epilogue()


def release(engine: Any) -> None:
    """Empty what an engine at stage 3 holds: what DeepSpeed has hung on its parameters there keeps them for good."""
    zero, parameters = engine.optimizer, list(engine.module.parameters())
    moments = [state[kind] for state in zero.optimizer.state.values() for kind in MOMENTS]
    held = [*zero.fp32_partitioned_groups_flat, zero.grad_partitions_flat_buffer, *moments]
    for one in (*held, *(p.ds_tensor for p in parameters), *(p.data for p in parameters)):
        storage = one.untyped_storage()
        if storage.resizable():
            storage.resize_(0)


def steps_of(engine: Any, stage: int) -> int:
    """How many steps the optimizer has taken."""
    inner = engine.optimizer if stage == 0 else engine.optimizer.optimizer
    return max((int(state["step"]) for state in inner.state.values() if "step" in state), default=0)


def _whole(engine: Any, trained: list[tuple[str, nn.Parameter]]) -> Iterator[Fragment]:
    for name, parameter in trained:
        state = engine.optimizer.state[parameter]
        tensors = {WEIGHT: parameter.data.view(-1)} | {kind: state[kind].view(-1) for kind in MOMENTS}
        yield Fragment(name, 0, tensors)


def _of_partition(trained: list[tuple[str, nn.Parameter]]) -> Iterator[Fragment]:
    """At stages 1 and 2 a rank holds a stretch of all parameters laid end to end."""
    for name, parameter in trained:
        held = parameter._hp_mapping  # type: ignore[attr-defined]
        if held is None:
            continue
        tensors = {WEIGHT: held.hp_fragment.view(-1)}
        tensors |= {kind: held.get_optim_state_fragment(kind).view(-1) for kind in MOMENTS}
        yield Fragment(name, held.lp_fragment_address.start, tensors)


def _of_partitioned_weights(zero: Any, trained: list[tuple[str, nn.Parameter]], rank: int) -> Iterator[Fragment]:
    """At stage 3 a rank holds an even share of each parameter; the last one's is padded."""
    for name, parameter in trained:
        share = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        start = rank * share
        size = min(share, parameter.ds_numel - start)  # type: ignore[attr-defined]
        if size <= 0:
            continue
        tensors = {WEIGHT: zero._get_fp32_opt_state_partition(parameter, False)[0][:size]}
        for kind in MOMENTS:
            tensors[kind] = zero._get_fp32_opt_state_partition(parameter, False, kind)[0][:size]
        yield Fragment(name, start, tensors)
