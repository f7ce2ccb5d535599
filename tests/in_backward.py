"""What torch and TorchRec have for optimizers in backward, imported without their warnings about torch.jit."""

import warnings

with warnings.catch_warnings(action="ignore"):
    from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map
    from torchrec.optim import RowWiseAdagrad

__all__ = ["RowWiseAdagrad", "_apply_optimizer_in_backward", "_get_in_backward_optimizers", "param_to_optim_hook_handle_map"]
