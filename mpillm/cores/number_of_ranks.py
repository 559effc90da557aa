"""The number of ranks of a test."""

from __future__ import annotations

import disagg
from mpillm.cores.registry import BackendRegistry
from mpillm.devices import visible_gpus
from mpillm.options.disagg_yaml import generated, server_ranks
from mpillm.options.run_config import RunConfig


def ranks_of(config: RunConfig) -> int:
    """Return --world_size, or the ranks of the instances in the options or the YAML plus control ranks.

    An aggregated test has as many instances as this node's GPUs hold, or one if the GPUs are unknown. A
    client core has one rank for each of --trtllm_server_urls, or one rank without URLs.
    """
    if config.world_size:
        return int(config.world_size)
    if (n_ranks := server_ranks(config)) is not None:
        return disagg.ranks_for(n_ranks, config.control_ranks)
    if config.server:
        n_servers = config.triton_num_servers or 1
        return disagg.ranks_for(config.clients_of_a_server * n_servers, config.control_ranks)
    if BackendRegistry.get(config.core_type).is_client:
        return disagg.ranks_for(len(config.trtllm_server_urls or ()) or 1, config.control_ranks)
    if config.yaml is not None:
        return disagg.ranks_for(config.yaml.n_workers, config.control_ranks)
    workers = generated(config, None).n_workers
    if config.mode == "aggregated":
        workers *= max(1, len(visible_gpus() or ()) // workers)
    return disagg.ranks_for(workers, config.control_ranks)
