"""Lookups in torch: tracing and transforms; with other defaults, and with the kernels of other processors.

As a script it looks up in separate processes, and saves their results.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bag_tables import every_order, pool_arguments
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from comera_rec import TTEmbeddingBag
from comera_rec.nn import update_in_backward_
from comera_rec.ops import plan_lookup, tt_bags
from comera_rec.tt import TTShape

BY_ORDER = {
    2: TTShape((5, 4), (3, 2), (4,)),
    3: TTShape((5, 4, 3), (2, 3, 2), (4, 3)),
    4: TTShape((3, 4, 2, 3), (2, 1, 2, 3), (3, 5, 2)),
}
CPU = torch.device("cpu")
BATCH = (torch.tensor([3, 11, 3, 0, 17, 5, 5]), torch.tensor([0, 2, 2, 6]))
PROCESSORS = ("portable", "avx2", "avx512")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch 2.14's own check
def test_the_registrations_follow_torch_librarys_rules() -> None:
    ops, shape = torch.ops.comera_rec, BY_ORDER[3]
    ids = [torch.randint(shape.num_rows, (7,)), torch.randint(shape.num_rows, (2, 3), dtype=torch.int32)]
    torch.library.opcheck(ops.plan_lookup.default, (ids, [shape.num_rows, shape.num_rows - 1], list(shape.row_shape) * 2))
    arguments = {**pool_arguments(num_cols=5), "weights": torch.rand(5), "slots": [1, 0], "offsets": torch.tensor([0, 2, 4])}
    torch.library.opcheck(ops.pool_backward.default, (torch.randn(1, 10), *arguments.values()))
    for tensor in (*arguments["cores"], *arguments["diagonals"], arguments["weights"]):
        tensor.requires_grad_()
    torch.library.opcheck(ops.pool.default, tuple(arguments.values()))


def bag_of(order: int, **arguments: Any) -> TTEmbeddingBag:
    shape = BY_ORDER[order]
    bag = TTEmbeddingBag(shape.num_rows - 1, shape.num_cols - 1, shape=shape, **arguments)
    for rank in bag.rank_parameters():
        if not rank.is_meta:
            nn.init.uniform_(rank, 0.5, 1.5)
    return bag


@every_order
def test_fake_and_meta_tensors_get_the_right_shapes_and_gradients_their_cores_layout(order: int) -> None:
    def look_up(device: str) -> list[tuple[torch.Size, torch.dtype, tuple[int, ...]]]:
        bag = bag_of(order, device=device, dtype=torch.bfloat16)
        weights = torch.ones(7, device=device, dtype=torch.bfloat16, requires_grad=True)
        out = bag(BATCH[0].to(device), BATCH[1].to(device), weights)
        assert (out.device.type, out.dtype) == (device, torch.bfloat16)
        inputs = [*bag.parameters(), weights]
        gradients = torch.autograd.grad(out.sum(), inputs)
        assert [gradient.stride() for gradient in gradients] == [each.stride() for each in inputs], "optimizers need no copies"
        return [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in (out, *gradients)]

    expected = look_up("cpu")
    assert look_up("meta") == expected
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert look_up("cpu") == expected


@pytest.mark.parametrize(("mode", "order"), [("sum", 2), ("mean", 3), ("max", 4)])
def test_torch_func_grad_and_forward_mode(mode: str, order: int) -> None:
    bag = bag_of(order, mode=mode)
    weights = torch.rand(7, requires_grad=True) if mode == "sum" else None
    inputs: dict[str, Tensor] = dict(bag.named_parameters())
    if weights is not None:
        inputs["weights"] = weights

    def loss(values: dict[str, Tensor]) -> Tensor:
        parameters = {name: value for name, value in values.items() if name != "weights"}
        return torch.func.functional_call(bag, parameters, (*BATCH, values.get("weights"))).square().sum()

    actual = torch.func.grad(loss)({name: value.detach() for name, value in inputs.items()})
    expected = torch.autograd.grad(bag(*BATCH, weights).square().sum(), list(inputs.values()))
    torch.testing.assert_close([*actual.values()], [*expected])
    tangents = {name: torch.randn_like(value) for name, value in inputs.items()}
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(loss({n: forward_ad.make_dual(v.detach(), tangents[n]) for n, v in inputs.items()})).tangent
    torch.testing.assert_close(slope, sum((tangents[name] * gradient).sum() for name, gradient in actual.items()))


@pytest.mark.parametrize(("mode", "order"), [("sum", 2), ("weighted", 3), ("mean", 4), ("max", 2)])
def test_the_reference_can_be_differentiated_twice(mode: str, order: int) -> None:
    bag = bag_of(order, impl="reference", mode="sum" if mode == "weighted" else mode, hot_rows=((4, 2), (3, 1))).double()
    for block in bag.hot_blocks():
        nn.init.normal_(block.core_0)  # it starts at zero
    weights = [torch.rand(7, dtype=torch.float64, requires_grad=True)] if mode == "weighted" else []
    names, parameters = zip(*bag.named_parameters(), strict=True)

    def look_up(*tensors: Tensor) -> Tensor:
        return torch.func.functional_call(bag, dict(zip(names, tensors, strict=False)), (*BATCH, *tensors[len(names) :]))

    assert torch.autograd.gradgradcheck(look_up, [*parameters, *weights], fast_mode=True)


@pytest.mark.parametrize("is_updated", [False, True])
def test_a_second_derivative_of_operators_is_refused(is_updated: bool) -> None:
    bag = bag_of(2)
    if is_updated:  # an optimizer of the cores in backward leaves gradients of rank parameters
        update_in_backward_(bag, torch.optim.SGD(bag.cores(), lr=0.1))
    wanted = [*bag.rank_parameters(), *([] if is_updated else bag.cores())]
    gradients = torch.autograd.grad(bag(*BATCH).tanh().square().sum(), wanted, create_graph=True)
    with pytest.raises(RuntimeError, match="can't be differentiated twice"):
        torch.autograd.grad(gradients, wanted, [torch.ones_like(each) for each in wanted])


def look_up(impl: str = "auto", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Bags and all gradients of tables of two to four cores, with explicit devices and types for all tensors."""
    draw = torch.Generator(device=CPU).manual_seed(0)
    results: list[Tensor] = []
    for shape in (*BY_ORDER.values(), TTShape((40, 30), (8, 16), (11,)), TTShape((6, 5, 4), (2, 4, 12), (5, 9))):
        ids = torch.randint(shape.num_rows, (600,), generator=draw, device=CPU, dtype=torch.int64)
        sizes = [*shape.core_shapes, *((rank,) for rank in shape.ranks)]
        parameters = [torch.randn(size, generator=draw, device=CPU, dtype=torch.float32).to(dtype) for size in sizes]
        weights = torch.rand(600, generator=draw, device=CPU, dtype=torch.float32).to(dtype)
        gradient = torch.randn(150, shape.num_cols, generator=draw, device=CPU, dtype=torch.float32).to(dtype)
        for tensor in (*parameters, weights):
            tensor.requires_grad_()
        plan = plan_lookup([ids], [shape.row_shape], impl=impl)
        offsets = torch.arange(0, 601, 4, device=CPU, dtype=torch.int64)
        for mode in ("sum", "max"):
            mode_weights = weights if mode == "sum" else None
            inputs = parameters if mode_weights is None else [*parameters, mode_weights]
            tables = [(parameters[: shape.order], parameters[shape.order :])]
            out = tt_bags(tables, plan, offsets, num_cols=shape.num_cols, mode=mode, per_sample_weights=mode_weights, impl=impl)
            results += [out.detach(), *torch.autograd.grad((out * gradient).sum(), inputs)]
        if impl == "auto":
            results += plan
    return results


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"], ids=str)
def test_defaults_do_not_matter(default: torch.dtype | str) -> None:
    expected = look_up()
    try:
        (torch.set_default_device if default == "meta" else torch.set_default_dtype)(default)
        actual = look_up()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def run_in_separate_processes(folder: Path) -> None:
    """Look up with the kernels of each processor, and save the result or the error of each process.

    Processes are forked, because importing torch takes seconds.
    """
    for name in (*PROCESSORS, "abacus"):
        if os.fork() == 0:
            try:
                os.environ["COMERA_CPU"] = name
                actual = {"results": look_up(), "cpu": torch.ops.comera_rec.cpu()}
            except Exception as error:
                actual = {"error": repr(error)}
            torch.save(actual, folder / f"{name}.pt")
            os._exit(0)
        os.wait()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`processes(name)` -> the saved result or error of that process."""
    folder = tmp_path_factory.mktemp("processes")
    environment = {name: value for name, value in os.environ.items() if name != "COMERA_CPU"}
    subprocess.run([sys.executable, __file__, str(folder)], check=True, env=environment)
    return lambda name: torch.load(folder / f"{name}.pt")


@pytest.mark.parametrize("name", [*PROCESSORS, "abacus"])
def test_every_processors_kernels_or_refusal(name: str, processes: Callable[[str], dict[str, Any]]) -> None:
    runs, outcome = PROCESSORS[: 1 + PROCESSORS.index(torch.ops.comera_rec.cpu())], processes(name)
    if name == "abacus" or (name not in runs and "COMERA_CPU" not in os.environ):
        choose = "choose portable, avx2 or avx512, or unset it"
        assert outcome["error"].startswith(f"""ValueError("COMERA_CPU is '{name}', which this machine doesn't run: {choose}""")
        return
    assert outcome["cpu"] == name
    actual = [tensor for tensor in outcome["results"] if tensor.is_floating_point()]
    for tensor, exact in zip(actual, look_up("reference", torch.float64), strict=True):
        torch.testing.assert_close(tensor.double(), exact, rtol=0, atol=1e-5 * exact.abs().max().item())


if __name__ == "__main__":
    run_in_separate_processes(Path(sys.argv[1]))
