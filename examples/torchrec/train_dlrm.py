"""TorchRec's DLRM on random clicks, sharded by its planner: torchrun --standalone --nproc-per-node 2 FILE"""

import gc
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import planner as planners
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

BATCH, STEPS, DIM, DENSE, LR = 512, 50, 64, 13, 0.02
ROWS = {"user": 500_000, "product": 200_000, "category": 500, "country": 200}


def random_clicks(count: int) -> Iterator[Batch]:
    """Batches whose clicks depend on the country and on one dense feature."""
    for _ in range(count):
        ids = torch.cat([torch.randint(rows, (BATCH,)) for rows in ROWS.values()])
        features = KeyedJaggedTensor(list(ROWS), ids, lengths=torch.ones(len(ids), dtype=torch.int64))
        dense = torch.randn(BATCH, DENSE)
        yield Batch(dense, features, (features["country"].values() % 2 == (dense[:, 0] > 0)).float())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    device, meta = torch.device("cpu"), torch.device("meta")

    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name]) for name, rows in ROWS.items()
    ]
    tables = EmbeddingBagCollection(configs, device=meta)
    size = sum(parameter.numel() for parameter in tables.parameters())
    model = DLRMTrain(DLRM(tables, DENSE, dense_arch_layer_sizes=[128, DIM], over_arch_layer_sizes=[128, 1], dense_device=device))

    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    topology = planners.Topology(dist.get_world_size(), device.type, local_world_size=local)
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR})
    planner, sharders = planners.EmbeddingShardingPlanner(topology, BATCH), [sharder]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)

    others = dict(in_backward_optimizer_filter(model.named_parameters()))  # dense tables are updated in the backward pass
    optimizer = KeyedOptimizerWrapper(others, lambda parameters: torch.optim.Adagrad(parameters, lr=LR))
    pipeline = TrainPipelineSparseDist(model, CombinedOptimizer([model.fused_optimizer, optimizer]), device)

    batches = random_clicks(STEPS)
    for step in range(1, STEPS + 1):
        loss, _, _ = pipeline.progress(batches)
        if step % 10 == 0:
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item() / dist.get_world_size():.4f}")
    if dist.get_rank() == 0:
        print(f"tables: {size:,} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    gc.collect()  # the model and its process group, whose threads could abort Python later, as it exits
