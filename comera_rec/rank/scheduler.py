"""The stages of rank-adaptive training: an early stage with a price on size, then a late stage that shrinks to a target.

    early                   L + gamma S + beta |G|^2
    late, "achievement"     max{w_loss (L - L0), w_size (S - S0)} + rho (L + S) + beta |G|^2
    late, "budget"          L alone, under a ceiling on the size, which falls to the target

L task loss, S size of all TT modules relative to that at the start of the stage, L0 and S0 their targets, |G|^2 mean square of the
cores. The first two are CoMERA's (arXiv 2405.14377), sections 3.2 and 3.3 and equation 10: S is the surrogate, and only a threshold
removes ranks, so whether the final size is S0 depends on the weights, as in the paper.
"""

import math
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.optim import Optimizer

from comera_rec.distributed import WORLD
from comera_rec.nn import TTModule, named_tt_modules
from comera_rec.ops.bags.updates import update_kinds
from comera_rec.rank.config import RankConfig
from comera_rec.rank.importance import NO_GRADIENTS, TaylorScores
from comera_rec.rank.penalty import core_norm, size_surrogate
from comera_rec.rank.selection import Masks, above_threshold, within_budget
from comera_rec.rank.truncation import keep_ranks_, magnitudes_of, require_known_states, require_optimized
from comera_rec.rank.tt_modules import ModuleSummary, bytes_outside, gather_tt_modules, total_bytes, total_params
from data_pipeline.errors import UserError


class RankScheduler:
    """Schedule of ranks: adds the price of size to the loss, counts steps and truncates ranks.

    With several processes, each builds a scheduler and calls the same methods at the same steps. All reach the same decisions,
    whether TT modules are replicated, sharded or on one process. After a truncation, DistributedDataParallel must wrap the model
    again (`rewrap_data_parallel_`).

    Modules with frozen rank parameters keep their ranks, and count as other layers.

    Args:
        model: contains the TT modules; build the scheduler after all swaps and after freezing, because it keeps their names.
            Under `DistributedModelParallel`, give its `module`, so that names are those of one process.
        optimizer: the optimizer of the model's parameters, whose state is sliced with them. Combine several
            with `torchrec.optim.CombinedOptimizer`.
        config: the schedule.
        other_bytes: bytes of all other layers; give it where each process has only part of them. Default: those of `model`.

    Raises:
        ValueError: if the model has no TT module to train; if what can't shrink, layers outside TT modules and linear ones of rank
            1, exceeds the target; if the optimizer lacks parameters of TT modules; if parameters whose gradients the schedule needs
            are updated in backward.

    Example:
        >>> scheduler = RankScheduler(model, optimizer, RankConfig(early_steps=1000))  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss = scheduler.loss(task_loss(model, batch))
        ...     optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: RankConfig,
        *,
        other_bytes: int | None = None,
    ) -> None:
        # Kept, because walking the model at each step takes long; TT modules keep their identity when ranks change.
        modules = dict(named_tt_modules(model))
        self._modules = {name: module for name, module in modules.items() if not _is_frozen(module)}
        summaries = self._summaries()
        if not summaries:
            remedy = "unfreeze at least one" if modules else "swap tables or linear layers before building a RankScheduler"
            raise UserError(f"the model has no TT module{' that is trained' if modules else ''}: {remedy}")
        _require_gradients(self._modules.values(), config)
        require_optimized(self._modules, optimizer)
        require_known_states(self._modules.values(), optimizer)
        self.optimizer = optimizer
        self.config = config
        self.stage = "early"
        self.steps = 0
        self.late_start = 0
        self.reference_params = total_params(summaries)
        self._num_cores = sum(summary.shape.order for summary in summaries.values())
        self.reference_size = 0
        self.target: int | None = None
        self.target_loss = config.target_loss
        self.history: list[dict[str, Any]] = []
        self._taylor = TaylorScores(self._modules)
        # Running mean of the task loss; NaN before the first finite one. A tensor, so that no step waits for the device.
        self._mean_loss = torch.tensor(math.nan, dtype=torch.float32, device=next(model.parameters()).device)
        self._other_bytes = bytes_outside(model, self._modules.values()) if other_bytes is None else other_bytes
        frozen = gather_tt_modules({name: module for name, module in modules.items() if name not in self._modules})
        self._frozen_savings = sum(each.unit * (each.dense_params - each.shape.num_params) for each in frozen.values())
        # Replicas on several processes together count once.
        self._replica_share = {name: 1 / count for name, count in WORLD.count(self._modules).items()}
        if config.late_steps and config.target_size is None:
            self._target(summaries)  # checks it before hours of training
        self._record(summaries)

    # -- the objective ---------------------------------------------------------------------------------------------------------

    def loss(self, task_loss: Tensor) -> Tensor:
        """Return the objective of the current stage for a task loss; call `backward` on it.

        With several processes, each passes the loss of its samples, and the objective is that of their mean.

        Args:
            task_loss: a scalar, the mean over a batch. If the gradients of n of them add up to a step, divide the result by n.

        Raises:
            ValueError: if the loss isn't a scalar.
        """
        given: Any = task_loss
        if isinstance(given, Proxy):  # a pipeline of TorchRec looks for sharded modules in a model that calls this
            return cast(Tensor, given.tracer.create_proxy("call_function", self.loss, (given,), {}))
        if task_loss.numel() != 1:
            raise UserError(f"task_loss has shape {tuple(task_loss.shape)}: give the mean over the batch, a scalar")
        if task_loss.dim():
            task_loss = task_loss.reshape(())
        if WORLD.several and self.stage != "done":
            task_loss = WORLD.mean(task_loss) + (task_loss - task_loss.detach())  # the same on all, gradient of this one
        self._observe(task_loss.detach())
        return self._objective(task_loss)

    @property
    def _prices_size(self) -> bool:
        """Whether the stage has CoMERA's price of size, and its threshold, below which ranks are truncated."""
        return self.stage == "early" or (self.stage == "late" and self.config.objective == "achievement")

    def _objective(self, loss: Tensor) -> Tensor:
        if not self._prices_size:
            return loss
        config, modules = self.config, list(self._modules.values())
        if self.stage == "early":
            total = loss + config.gamma * size_surrogate(modules) / self.reference_params if config.gamma else loss
        else:
            assert self.target is not None
            assert self.target_loss is not None, "the early stage sets both"
            size = self._size_surrogate() / self.reference_params
            gaps = config.w_loss * (loss - self.target_loss), config.w_size * (size - self.target / self.reference_size)
            total = torch.stack(gaps).max() + config.rho * (loss + size)
        return total + config.beta * core_norm(modules, self._num_cores) if config.beta else total

    def _size_surrogate(self) -> Tensor:
        """Return the size surrogate of the TT modules of all processes: the same on each, with the gradient of its own modules."""
        local = size_surrogate(self._modules.values())
        if not WORLD.several:
            return local
        sizes = {name: size_surrogate([module]).detach() for name, module in self._modules.items() if module.shape.num_params}
        shared = torch.stack([self._mean_loss.new_zeros(()), *(self._replica_share[name] * size for name, size in sizes.items())])
        return WORLD.sum(shared.sum()) + (local - local.detach())

    def _observe(self, loss: Tensor) -> None:
        # About the last hundred steps: long enough to smooth batches, short enough to follow training. In place, for CUDA graphs.
        mean = self._mean_loss
        updated = torch.where(mean.isnan(), loss, mean.lerp(loss.to(mean.dtype), 0.01))
        mean.copy_(torch.where(loss.isfinite(), updated, mean))

    def _mean_task_loss(self) -> float | None:
        mean = float(self._mean_loss)
        return None if math.isnan(mean) else mean

    # -- steps and stages ------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Count one optimizer step; truncate and change stage when they are due.

        Call it after `optimizer.step()` and before gradients are cleared.

        Returns:
            Whether it truncated: ranks, the stage or the objective may differ, so captured graphs are outdated, and data parallel
            replicas must be wrapped again. `history` has a new entry.
        """
        self.steps += 1
        if self.stage == "done":
            return False
        if self.steps == 1:  # the optimizer has state now: before it has trained for long
            require_known_states(self._modules.values(), self.optimizer)
        if self.stage == "late" and not self._prices_size:
            self._taylor.observe(self._total_of_shares if WORLD.several else None)
        early_ends = self.stage == "early" and self.steps >= self.config.early_steps
        late_ends = self.stage == "late" and self.steps - self.late_start >= self.config.late_steps
        if not (early_ends or late_ends or self.steps % self.config.truncate_every == 0):
            return False
        self._truncate(last=late_ends)
        if early_ends:
            self._end_early()
        elif late_ends:
            self.stage = "done"
        self._record(self._summaries())
        return True

    def _truncate(self, *, last: bool) -> None:
        if frozen := [name for name, module in self._modules.items() if _is_frozen(module)]:
            raise UserError(f"{frozen[0]!r} was frozen after the RankScheduler was built: freeze modules before building it")
        if self._prices_size:
            if self.config.threshold:
                summaries = self._summaries({name: magnitudes_of(module) for name, module in self._modules.items()})
                magnitudes, least_ranks = zip(*((each.scores, each.least_rank) for each in summaries.values()), strict=True)
                self._keep(summaries, above_threshold(magnitudes, self.config.threshold, least_ranks))
            return
        assert self.target is not None
        progress = 1.0 if last else (self.steps - self.late_start) / self.config.late_steps
        ceiling = round(allowed_size(progress, self.target / self.reference_size) * self.reference_size)
        # Until the last truncation the size stays a tenth above the target, which leaves ranks to choose from to meet it exactly.
        if self._size() > ceiling and (last or ceiling > 1.1 * self.target):
            summaries = self._summaries(self._scores())
            if unseen := [name for name, each in summaries.items() if any(bool(bond.isnan().any()) for bond in each.scores)]:
                raise UserError(f"no loss of the late stage depends on {unseen[0]!r}: freeze it before building the RankScheduler")
            shapes, scores = [each.shape for each in summaries.values()], [each.scores for each in summaries.values()]
            units = [each.unit if self.in_bytes else 1 for each in summaries.values()]
            lasting, least = [each.has_hot_rows for each in summaries.values()], [each.least_rank for each in summaries.values()]
            self._keep(summaries, within_budget(shapes, scores, ceiling, units, lasting=lasting, least=least, exact=last))

    def _summaries(self, scores: dict[str, list[Tensor]] | None = None) -> dict[str, ModuleSummary]:
        """Summarize the TT modules of all processes, by name."""
        return gather_tt_modules(self._modules, scores)

    def _keep(self, summaries: dict[str, ModuleSummary], masks: Masks) -> None:
        """Slice this process's modules to the ranks that the masks of all modules keep."""
        masks_by_name = dict(zip(summaries, masks, strict=True))
        local_masks = [masks_by_name[name] for name in self._modules]
        keep_ranks_(list(self._modules.values()), local_masks, self.optimizer)
        self._taylor.slice_(local_masks)

    def _scores(self) -> dict[str, list[Tensor]]:
        scores = self._taylor.mean
        if scores is not None and not float(self._total_of_shares(scores)):
            raise UserError(NO_GRADIENTS)  # on all processes at once
        return self._taylor.scores()

    def _total_of_shares(self, shares: Tensor) -> Tensor:
        """Sum shares [ranks of this process's modules] over the modules of all processes."""
        modules = self._modules
        weights = [self._replica_share[name] for name, module in modules.items() for _ in range(sum(module.shape.ranks))]
        total = WORLD.sum((shares @ shares.new_tensor(weights)).to(self._mean_loss.device))
        return total.to(shares.device)

    def _end_early(self) -> None:
        if self.config.late_steps == 0:
            self.stage = "done"
            return
        self.stage = "late"
        self.late_start = self.steps
        summaries = self._summaries()
        self.reference_params = max(1, total_params(summaries))
        self.reference_size = max(1, self._size())
        self.target = min(self._target(summaries), self.reference_size)
        if self.target_loss is None:
            self.target_loss = self._mean_task_loss()
        if self.target_loss is None and self.config.objective == "achievement":
            raise UserError(
                f"no finite loss was seen in the {self.steps} steps of the early stage: pass every step's loss through `loss`, "
                "or lower the learning rates"
            )

    # -- sizes, in bytes where the target is one of bytes, else in parameters ----------------------------------------------------

    @property
    def in_bytes(self) -> bool:
        """Whether `target` counts bytes; otherwise it counts parameters."""
        return self.config.target_bytes is not None or self.config.target_compression is not None

    def _size(self) -> int:
        summaries = self._summaries()
        return total_bytes(summaries) if self.in_bytes else total_params(summaries)

    def _target(self, summaries: dict[str, ModuleSummary]) -> int:
        config = self.config
        least = sum(each.least_params * (each.unit if self.in_bytes else 1) for each in summaries.values())
        if config.target_size is not None:
            return max(least, round(config.target_size * self.reference_size))
        if config.target_compression is not None:
            return self._compressed_bytes(config.target_compression, summaries, least)
        target, unit = config.target_params or config.target_bytes, "bytes" if self.in_bytes else "params"
        assert target is not None
        if target < least:
            raise UserError(f"target_{unit} is {target} but linear layers of rank 1 take {least:,}: give more")
        return target

    def _compressed_bytes(self, compression: float, summaries: dict[str, ModuleSummary], least: int) -> int:
        """Return the bytes left for TT modules when the whole model is `compression` times smaller than its dense form."""
        dense = self._other_bytes + self._frozen_savings + sum(each.dense_params * each.unit for each in summaries.values())
        others = self._other_bytes + sum(summary.order_bytes for summary in summaries.values())
        if others + least >= dense / compression:
            raise UserError(
                f"target_compression is {compression} but layers outside TT modules, row orders, and linear ones of rank 1, take "
                f"{others + least:,} of {dense:,} dense bytes: give less than {dense / max(1, others + least):.1f}, or compress "
                "more layers"
            )
        return int(dense / compression) - others

    # -- state -----------------------------------------------------------------------------------------------------------------

    @property
    def target_params(self) -> int | None:
        """Target parameters of all TT modules at the end of the late stage; None before that stage."""
        if self.target is None:
            return None
        return round(self.target / self.reference_size * self.reference_params)

    def record_sizes(self) -> None:
        """Add the present sizes to `history`, where tables have grown since a state was saved.

        What an early stage relates sizes to grows by as much, and a target that was reached, too.
        """
        before = self.history[-1]["params"]
        self._record(self._summaries())
        if self.stage == "early":
            self.reference_params += self.history[-1]["params"] - before
        if self.stage == "done" and self.target is not None:
            self.target = max(self.target, self._size())

    def _record(self, summaries: dict[str, ModuleSummary]) -> None:
        self.history.append(
            {
                "step": self.steps,
                "stage": self.stage,
                "params": total_params(summaries),
                "bytes": total_bytes(summaries),
                "target_params": self.target_params,
                "loss": self._mean_task_loss(),
                "ranks": {name: list(summary.shape.ranks) for name, summary in summaries.items()},
            }
        )

    _STATE = ("stage", "steps", "late_start", "reference_params", "reference_size", "target", "target_loss")

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain numbers, strings and lists; the ranks themselves are in the model's state dict.

        All processes must call this, as it gathers from them; then one may write it.
        """
        state = {name: getattr(self, name) for name in self._STATE}
        return {
            **state,
            "history": list(self.history),
            "mean_loss": self._mean_task_loss(),
            "taylor": WORLD.merge(self._taylor.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; load the model's and the optimizer's state dicts as well."""
        for name in self._STATE:
            setattr(self, name, state[name])
        self.history = list(state["history"])
        self._mean_loss.fill_(math.nan if state["mean_loss"] is None else state["mean_loss"])
        self._taylor.load_state_dict(state["taylor"])


def allowed_size(progress: float, target: float) -> float:
    """Return the ceiling of "budget" at a progress of 0 to 1 through the late stage, relative to the size at its start.

    S(t) = S0 + (1 - S0)(1 - t)^3: fast at first, while much is redundant. Zhu and Gupta, To Prune, or Not to Prune (arXiv
    1710.01878), equation 1.
    """
    return target + (1 - target) * (1 - progress) ** 3


def _is_frozen(module: TTModule) -> bool:
    return not all(rank.requires_grad for rank in module.rank_parameters())


def _require_gradients(modules: Collection[TTModule], config: RankConfig) -> None:
    """Raise ValueError if an update in backward consumes gradients that the schedule needs, or would apply a penalty separately."""
    if config.beta and any(update_kinds([core for module in modules for core in module.cores()])):
        raise UserError(
            f"beta is {config.beta}, a penalty on cores, which are updated in backward: a step would update them twice; set beta=0"
        )
    if config.late_steps and config.objective == "achievement" and any(module.core_0.element_size() < 4 for module in modules):
        raise UserError("rank parameters of 16 bits round off the small steps of 'achievement': train float32, or use 'budget'")
    need = None
    if config.late_steps:
        reads = {"budget": "reads the gradients of", "achievement": "puts a price on"}[config.objective]
        need = f"objective {config.objective!r} {reads} rank parameters"
    elif config.gamma:
        need = f"gamma is {config.gamma}, a price on rank parameters"
    if need and any(hasattr(rank, "_in_backward_optimizers") for module in modules for rank in module.rank_parameters()):
        raise UserError(f"{need}, which are updated in backward: give rank parameters a separate optimizer")
