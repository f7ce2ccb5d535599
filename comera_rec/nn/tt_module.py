"""The base of all TT modules: cores and rank parameters, their initialization, and changes of rank."""

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from comera_rec.ops.bags.updates import IN_BACKWARD, hooks_in_backward
from comera_rec.tt import TTShape, contract, init_cores_, scaled_cores, tt_svd_spectra
from data_pipeline.errors import UserError

CONVERT = "load it into the dense model, and convert that with comera_rec.compress_(..., init='tt_svd')"


class TTModule(nn.Module):
    """A matrix [num_rows, num_cols] in tensor-train form.

    Parameters are `core_0` ... `core_{d-1}` of shape (r_{k-1}, m_k, n_k, r_k) and, between neighbors, `rank_1` ... `rank_{d-1}` of
    shape (r_k, 1), the diagonals D_k that rank adaptation shrinks (CoMERA, section 3.2, arXiv 2405.14377): columns, because some
    optimizers take only parameters with rows. They are registered on the module itself, so code that materializes modules from the
    meta device with `reset_parameters` works.

    `shape` always describes the parameters. Loading a state dict of the same modes at other ranks resizes them in place. A module
    loads all of its tensors or none: if a state dict has only part of them, or one of another size, that is an error, `strict` or
    not, and nothing changes.

    A subclass calls `reset_parameters` once all its parameters exist.
    """

    core_0: nn.Parameter
    on_meta: tuple[nn.Parameter | None, ...] = ()  # former parameters, until others have taken their place

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        shape: TTShape,
        std: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= std < math.inf:
            raise UserError(f"std is {std}: give a finite number of at least 0")
        shape.require_covers(num_rows, num_cols)
        self.num_rows = num_rows
        self.num_cols = num_cols
        self.shape = shape
        self.std = std
        for k, core_shape in enumerate(shape.core_shapes):
            core = self.laid_out(k, torch.empty(core_shape, device=device, dtype=dtype))
            self.register_parameter(f"core_{k}", nn.Parameter(core))
        for k, rank in enumerate(shape.ranks, start=1):
            self.register_parameter(f"rank_{k}", nn.Parameter(torch.empty(rank, 1, device=device, dtype=dtype)))

    def reset_parameters(self) -> None:
        """Redraw the cores so that dense entries have standard deviation `std`; set the rank parameters to one.

        Raises:
            ValueError: if optimizers were applied in backward to parameters on the meta device, whose place others have taken.
        """
        if self.core_0.is_meta:
            self.on_meta = tuple(self._parameters.values())
            return
        former, present = (
            any(hasattr(each, "_in_backward_optimizers") for each in parameters)
            for parameters in (self.on_meta, self._parameters.values())
        )
        if former and not present:
            raise UserError(
                "optimizers in backward were applied to TT parameters on the meta device, and are lost as these get values: apply "
                "them afterwards; those of tables are kept where DistributedModelParallel has our sharders and a plan"
            )
        self.on_meta = ()
        init_cores_(self.cores(), self.shape, self.std)
        with torch.no_grad():
            for rank in self.rank_parameters():
                rank.fill_(1.0)

    def _stay_unquantized(self, qconfig: object) -> None:
        warnings.warn(
            "quantization leaves TT modules as they are: comera export --dtype int8 stores tables in 8 bits, and what export_dense "
            "returns can be quantized",
            stacklevel=3,
        )

    # `torch.ao.quantization`, on which TorchRec's is based, sets and deletes it on every module.
    qconfig = property(lambda self: None, _stay_unquantized, lambda self: None)

    def __prepare_scriptable__(self) -> "TTModule":
        """Raise ValueError: `torch.jit.script` calls this for every module of a model."""
        raise UserError(
            "TT modules can't be compiled by torch.jit.script: use torch.export or torch.compile, or script export_dense's model"
        )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; raise ValueError for a weight, with which a dense module would be tied."""
        if name == "weight":
            raise UserError(f"a {type(self).__name__} has cores and no weight to set or to tie: tie dense modules, then compress_")
        super().register_parameter(name, param)

    def laid_out(self, k: int, core: Tensor) -> Tensor:
        """Return the k-th core in the memory layout that the module uses."""
        return core

    def cores(self) -> list[nn.Parameter]:
        """Return the cores G_1..G_d."""
        return self._registered("core", range(self.shape.order))

    def rank_parameters(self) -> list[nn.Parameter]:
        """Return the rank parameters D_1..D_{d-1}."""
        return self._registered("rank", range(1, self.shape.order))

    def _registered(self, kind: str, numbers: range) -> list[nn.Parameter]:
        # Faster than looking up attributes of a module, of which a model has hundreds.
        parameters: dict[str, Any] = self._parameters
        try:
            return [parameters[f"{kind}_{k}"] for k in numbers]
        except KeyError as error:
            raise UserError(
                f"{error.args[0]} of a {type(self).__name__} isn't a parameter any more: don't parametrize or prune TT modules; "
                "replicate them, or shard them by TorchRec, instead of wrapping them by FullyShardedDataParallel"
            ) from None

    @property
    def whole_shape(self) -> TTShape:
        """Shape of the whole matrix, also where this module is a shard of it."""
        return self.shape

    @property
    def dense_params(self) -> int:
        """Parameters of the whole dense matrix, also where this module is a shard of it."""
        return self.num_rows * self.num_cols

    def scaled_cores(self) -> list[Tensor]:
        """Return the cores with every D_k multiplied into the smaller of its two neighbors."""
        return scaled_cores(self.cores(), self.rank_parameters())

    def dense_matrix(self) -> Tensor:
        """Return the dense matrix [num_rows, num_cols]; differentiable."""
        return contract(self.scaled_cores()).reshape(self.shape.num_rows, self.shape.num_cols)[: self.num_rows, : self.num_cols]

    def set_dense_matrix_(self, matrix: Tensor, *, rtol: float = 0.0) -> None:
        """Set the cores to the TT-SVD of a matrix [num_rows, num_cols]; with `rtol` > 0, ranks shrink within that error."""
        self.set_cores_(tt_svd_spectra(matrix, self.shape, rtol=rtol)[0])

    def set_cores_(self, cores: Sequence[Tensor]) -> None:
        """Set the cores and their ranks; the scale is spread evenly over the cores, and rank parameters become one."""
        norms = [float(torch.linalg.vector_norm(core, dtype=torch.float64)) for core in cores]  # of halves they may overflow
        mean_norm = torch.tensor(norms, dtype=torch.float64).log().mean().exp().item() if all(norms) else 0.0
        self.resize_ranks_([core.shape[-1] for core in cores[:-1]])
        with torch.no_grad():
            for parameter, core, norm in zip(self.cores(), cores, norms, strict=True):
                parameter.copy_(core * (mean_norm / norm) if mean_norm else core)
            for rank in self.rank_parameters():
                rank.fill_(1.0)

    def resize_ranks_(self, ranks: Sequence[int]) -> None:
        """Resize the parameters to other ranks; they keep their identity, but lose their values where sizes change."""
        self.shape = self.shape.with_ranks(tuple(ranks))
        sizes = [*self.shape.core_shapes, *((r, 1) for r in self.shape.ranks)]
        for k, (parameter, size) in enumerate(zip([*self.cores(), *self.rank_parameters()], sizes, strict=True)):
            if parameter.shape != size:
                with torch.inference_mode(False):  # or it couldn't be trained after it was loaded for inference
                    data = parameter.data.new_empty(size)
                    replace_data_(parameter, self.laid_out(k, data) if k < self.shape.order else data)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        parameters = {name: tensor for name, tensor in (*self._parameters.items(), *self._buffers.items()) if tensor is not None}
        stored = {name: state_dict[prefix + name] for name in parameters if isinstance(state_dict.get(prefix + name), Tensor)}
        ranks, refusal = self._stored_ranks(parameters, stored), ""
        is_dense = prefix + "weight" in state_dict and "core_0" not in stored
        if is_dense:
            refusal = f"the state dict has a dense weight: {CONVERT}"
        elif stored.keys() != parameters.keys():
            refusal = f"the state dict lacks {', '.join(name for name in parameters if name not in stored)}: complete it"
        elif f"{prefix}core_{self.shape.order}" in state_dict:
            refusal = f"the state dict has more than {self.shape.order} cores: load one of a module of the same modes"
        elif any(value.is_meta > parameters[name].is_meta for name, value in stored.items()):
            refusal = "the state dict is on the meta device, without values: load one that has them"
        if ranks is not None and not refusal:
            self.resize_ranks_(ranks)
        elif is_dense and not stored:
            warnings.warn(f"the state dict has dense weights for TT modules, which keep their values: {CONVERT}", stacklevel=2)
        elif stored:
            # torch copies tensors that fit and reports the others. The module's tensors replace those that fit, so nothing changes.
            kept = {prefix + name: parameters[name] for name, value in stored.items() if value.shape == parameters[name].shape}
            state_dict = {**state_dict, **kept}
            if refusal:
                where = f"{prefix[:-1]}: " if prefix else ""
                error_msgs.append(f"{where}a {type(self).__name__} loads all of its tensors or none, and {refusal}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if local_metadata.get("assign_to_params_buffers"):  # takes tensors as they are laid out
            for k, core in enumerate(self.cores()):
                core.data = self.laid_out(k, core.data)

    def _stored_ranks(self, parameters: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> tuple[int, ...] | None:
        """Return the ranks at which all stored tensors fit, or None if there are no such ranks."""
        cores = [stored[f"core_{k}"] for k in range(self.shape.order) if f"core_{k}" in stored]
        if stored.keys() != parameters.keys() or any(core.dim() != 4 for core in cores):
            return None
        shape = self.shape.with_ranks([core.shape[3] for core in cores[:-1]])
        sizes: dict[str, Sequence[int]] = {name: parameter.shape for name, parameter in parameters.items()}
        sizes |= {f"core_{k}": size for k, size in enumerate(shape.core_shapes)}
        sizes |= {f"rank_{k}": (rank, 1) for k, rank in enumerate(shape.ranks, start=1)}
        return shape.ranks if all(stored[name].shape == size for name, size in sizes.items()) else None

    def to_dense(self) -> nn.Module:
        """Return the plain torch module with the same matrix.

        Raises:
            TypeError: if there is no such module.
        """
        raise TypeError(f"a {type(self).__name__} has no dense equivalent")

    def extra_repr(self) -> str:
        modes = " ".join(f"{m}x{n}" for m, n in zip(self.shape.row_shape, self.shape.col_shape, strict=True))
        return f"{self.num_rows}, {self.num_cols}, modes=[{modes}], ranks={self.shape.ranks}, params={self.shape.num_params}"


def std_of(weight: Tensor) -> float | None:
    """Return the standard deviation of a weight's entries; None if they have no values, or some that are not finite."""
    if weight.is_meta or isinstance(weight, FakeTensor):
        return None
    std = float(weight.detach().std(correction=0))
    return std if math.isfinite(std) else None


def replace_data_(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, in place; its gradient is dropped.

    While any graph is alive, usually that of the last loss, autograd keeps the node that accumulates a parameter's gradient, and
    with it the old shape. It makes a new node only when the parameter's type changes, so this makes a detour through another type.
    Hooks of optimizers applied in backward are on that node; they move to the new one.
    """
    hooks = _take_hooks(parameter)
    parameter.grad = None
    parameter.data = data.new_empty(0, dtype=torch.float32 if data.dtype == torch.float64 else torch.float64)
    parameter.data = data
    if hooks:
        in_backward, is_trained = sys.modules[IN_BACKWARD], parameter.requires_grad
        with torch.enable_grad():
            view: Any = parameter.requires_grad_().view_as(parameter)
        parameter.requires_grad_(is_trained)
        node = view.grad_fn.next_functions[0][0]
        in_backward.param_to_acc_grad_map[parameter] = node
        in_backward.param_to_optim_hook_handle_map[parameter] = [node.register_hook(hook) for hook in hooks]


def _take_hooks(parameter: nn.Parameter) -> list[Any]:
    """Remove and return the hooks of `apply_optimizer_in_backward`, which run when the parameter's gradient is ready."""
    hooks = hooks_in_backward(parameter)
    for handle, _ in hooks:
        handle.remove()
    if IN_BACKWARD in sys.modules:  # later hooks must not be put on the old node
        sys.modules[IN_BACKWARD].param_to_acc_grad_map.pop(parameter, None)
    return [hook for _, hook in hooks]


def named_tt_modules(model: nn.Module) -> Iterator[tuple[str, TTModule]]:
    """Yield (fully qualified name, module) of every TT module in a model; of modules that share cores, only the first."""
    seen = set[int]()
    for name, module in model.named_modules():
        if isinstance(module, TTModule) and id(module.core_0) not in seen:
            seen.add(id(module.core_0))
            yield name, module
