"""FastDeploy's configuration, as far as anything here reads it: the same names in the same places."""

from types import SimpleNamespace
from typing import Any, NamedTuple


class EngineLine(NamedTuple):
    """What the launch line of one rank says. `mtp`: a draft model runs beside the main one. `num_blocks`: pages of the
    KV cache."""

    port: int
    rank: int
    num_ranks: int
    load_strategy: str
    model_dir: str
    rsync_config: dict[str, Any]
    collectives: str
    mtp: bool = False
    graphs: bool = False
    num_blocks: int = 8
    shutdown_comm_group_if_worker_idle: bool = True


class FDConfig:
    """Namespaces of settings; each attribute is one of FastDeploy's of that name."""

    def __init__(self, line: EngineLine, tp_group: Any = None) -> None:
        architecture = "StandinForCausalLM"
        self.load_config = SimpleNamespace(
            dynamic_load_weight=True,
            load_strategy=line.load_strategy,
            rsync_config=line.rsync_config or None,
            model_loader_extra_config=None,
        )
        self.parallel_config = SimpleNamespace(
            tensor_parallel_rank=line.rank,
            tensor_parallel_size=line.num_ranks,
            tp_group=tp_group,
            ep_group=None,
            use_ep=False,
            enable_expert_parallel=False,
            expert_parallel_rank=0,
            expert_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            local_data_parallel_id=0,
            local_engine_worker_queue_port=line.port,
            engine_worker_queue_port=[line.port],
            engine_pid=line.port,
            device_ids=",".join(map(str, range(line.num_ranks))),
            shutdown_comm_group_if_worker_idle=line.shutdown_comm_group_if_worker_idle,
        )
        self.model_config = SimpleNamespace(
            model=line.model_dir,
            architectures=[architecture],
            dtype="float32",
            num_hidden_layers=2,
            version="",
        )
        self.cache_config = SimpleNamespace(
            num_cpu_blocks=0,
            total_block_num=line.num_blocks,
            block_size=4,
            kvcache_storage_backend=None,
            enable_prefix_caching=False,
        )
        self.scheduler_config = SimpleNamespace(
            max_num_seqs=4, splitwise_role="mixed", enable_overlap_schedule=False, name="local"
        )
        self.graph_opt_config = SimpleNamespace(use_cudagraph=line.graphs, graph_opt_level=0)
        self.speculative_config = SimpleNamespace(method="mtp" if line.mtp else None)
        self.eplb_config = SimpleNamespace(enable_eplb=False)
        self.routing_replay_config = SimpleNamespace(enable_routing_replay=False)
